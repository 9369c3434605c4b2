"""Every flag of Megatron-DeepSpeed's parser has a fate; its own script for Llama runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from docs.site.megatron_flags import current_flags, fate
from megatron_zpp.config.root import parse_args, parse_command_line
from tests.config.command_line import MINIMAL

FLAGS = Path(__file__).with_name("megatron_deepspeed_flags.txt").read_text().split()


def test_every_flag_of_its_parser_is_obeyed_listed_or_refused() -> None:
    current = current_flags()
    assert {fate(name, current)[0] for name in FLAGS} == {"obeyed", "no effect", "one value", "refused"}
    assert len(FLAGS) == len(set(FLAGS)) > 300


def test_as_many_heads_of_keys_as_of_queries_are_the_usual_attention() -> None:
    model = parse_args([*MINIMAL, "--num-key-value-heads", "4"]).model
    assert replace(model, group_query_attention=False) == parse_args(MINIMAL).model


# The flags of pretrain_llama2_distributed.sh with its values, but for sizes of parallelism.
LLAMA = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 2048
    --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32
    --seq-length 2048 --max-position-embeddings 2048 --train-iters 250000 --save tmp --load tmp
    --data-path 1 data --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model tokenizer.model --split 949,50,1 --distributed-backend nccl --lr 3e-4
    --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 2000
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000
    --eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling --attention-dropout 0
    --hidden-dropout 0 --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu
    --normalization rmsnorm --disable-bias-linear --num-key-value-heads 4
    --deepspeed-activation-checkpointing --recompute-granularity full --recompute-method uniform
    --zero-stage=0 --deepspeed_config=deepspeed.json --deepspeed
"""
LLAMA_FILE = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
}


def test_its_script_for_llama_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deepspeed.json").write_text(json.dumps(LLAMA_FILE))
    model = parse_command_line(LLAMA.split(), ranks=lambda plan: 8).config.model
    assert (model.normalization, model.position_embedding_type, model.num_query_groups) == (
        "RMSNorm",
        "rope",
        4,
    )
    assert model.group_query_attention
    assert model.activation == "swiglu"
