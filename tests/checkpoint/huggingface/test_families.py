"""Llama-like models from and to Hugging Face: bits, sharded files, and runs at any stage."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_zpp.checkpoint.huggingface.importing import open_weights, read_settings
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.root import Config, parse_command_line
from megatron_zpp.config.sources.huggingface import HuggingFaceModel
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests.checkpoint.huggingface.gpt2 import SOURCE, check_equal, entries, save, tensors, theirs
from tests.model.families import FAMILIES, with_images
from tests.support import logged, nightly, refusal, trained

LENGTH = 16
RUN = (
    "--mock-data --micro-batch-size 2 --eval-iters 1 --num-workers 0 --seq-length 16 --train-iters 1 "
    "--lr 1e-30 --weight-decay 0"
).split()
SPARE = 64


def directory_of(family: str, bpe: Path, directory: Path, **how: Any) -> Path:
    """A model of the family and a tokenizer beside it; a Qwen has more rows than that has entries."""
    chosen = FAMILIES[family]
    settings = chosen.settings | {"vocab_size": entries(bpe) + SPARE * ("qwen" in family)}
    return save(type(chosen)(chosen.config, settings).model(), bpe, directory, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_then_export_returns_every_bit(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, family: str
) -> None:
    """From several files; both commands compare logits with those of transformers.

    transformers reads a tokenizer beside a Qwen2 as Qwen2's own, which normalises texts; ours does not.
    """
    source = directory_of(family, bpe, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    for said in (
        tool("import", source, tmp_path / "ours"),
        tool("export", tmp_path / "ours", tmp_path / "back", *["--no-tokenizer"] * ("qwen2" in family)),
    ):
        assert "logits: largest difference" in said
    check_equal(tensors(tmp_path / "back"), tensors(source))
    rows = [
        json.loads((each / "config.json").read_text())["vocab_size"] for each in (tmp_path / "back", source)
    ]
    assert rows[0] == rows[1] == entries(bpe) + SPARE * ("qwen" in family)


@pytest.mark.parametrize("family", ["gemma3-full", "mistral-small"])
def test_of_a_model_of_images_the_text_is_imported(
    tool: Callable[..., str], bpe: Path, tmp_path: Path, family: str
) -> None:
    """Its logits are compared with those of the whole model, which has other names for its tensors."""
    chosen = FAMILIES[family]
    text = type(chosen)(chosen.config, chosen.settings | {"vocab_size": entries(bpe)}).model()
    source = save(with_images(text.config), bpe, tmp_path / "theirs")
    said = tool("import", source, tmp_path / "ours")
    assert "its text alone; the model of images is omitted" in said
    assert "logits: largest difference" in said
    tool("export", tmp_path / "ours", tmp_path / "back", "--no-tokenizer")
    whole, back = tensors(source), tensors(tmp_path / "back")
    assert len(back) == len(list(text.parameters()))
    check_equal(back, {name: whole[f"language_model.{name}"] for name in back})


@pytest.mark.parametrize(
    "family", ["qwen3", *map(nightly, "qwen2 gemma3 starcoder2-window olmo3 phi3 bloom-heads".split())]
)
def test_a_run_starts_from_a_llama(tool: Callable[..., str], bpe: Path, tmp_path: Path, family: str) -> None:
    """With its shape and tokenizer; a step too small to change a weight saves what was loaded."""
    source = directory_of(family, bpe, tmp_path / "theirs")
    stage, world = ("0", 1) if family == "qwen3" else ("3", 2)
    flags = [*RUN, "--zero-stage", stage, "--load", f"hf:{source}", "--save", str(tmp_path / "run")]
    trained(*flags, processes=world)
    (source / "config.json").rename(source / "moved.json")  # a checkpoint does not need it
    tool("export", tmp_path / "run", tmp_path / "back", *["--no-tokenizer"] * ("qwen2" in family))
    check_equal(tensors(tmp_path / "back"), tensors(source))


@pytest.mark.parametrize("family", ["gpt2", "llama", nightly("qwen3"), nightly("mistral-window")])
def test_the_loss_of_a_run_is_that_of_transformers(bpe: Path, tmp_path: Path, family: str) -> None:
    """At the first step, of a run that hf:DIR alone gives model, weights and tokenizer."""
    if family == "gpt2":
        source = save(theirs(bpe), bpe, tmp_path / "theirs")
    else:
        source = directory_of(family, bpe, tmp_path / "theirs")
    tokenizer = HuggingFaceTokenizer(str(source))
    tokens = tokenizer.encode(SOURCE)[: 4 * LENGTH + 1]  # Megatron-LM's order does not cut them elsewhere
    with IndexedDatasetWriter(tmp_path / "data", np.uint16, provenance=describe(tokenizer)) as writer:
        writer.add_document(np.array(tokens))
    flags = f"--train-data-path {tmp_path}/data --seq-length {LENGTH} --micro-batch-size 4 --train-iters 1"
    flags += " --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --eval-iters 0 --num-workers 0"
    metrics = tmp_path / "metrics.jsonl"
    flags += f" --dataset-order megatron --log-interval 1 --metrics-file {metrics} --load hf:{source}"
    trained(*flags.split())
    loaded = AutoModelForCausalLM.from_pretrained(source).float().eval()
    windows = torch.tensor([tokens[first : first + LENGTH + 1] for first in range(0, 4 * LENGTH, LENGTH)])
    with torch.no_grad():
        logits = loaded(windows[:, :-1]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item()
    assert logged(metrics) == [pytest.approx(expected, rel=1e-5)]


OF_MODEL = "the model of --load hf:{0} has"


@pytest.mark.parametrize(
    ("family", "given", "said"),
    [
        ("qwen3", "--padded-vocab-size 384", f"--padded-vocab-size 384: {OF_MODEL} vocab_size {{1}}"),
        ("llama", "--padded-vocab-size 7", "must be at least {2}, the tokenizer's entries"),
        ("qwen3", "--rotary-base 500", f"--rotary-base 500.0: {OF_MODEL} rotary_base 10000.0; omit it"),
        ("llama", "--squared-relu", f"--squared-relu (given): {OF_MODEL} squared_relu False; omit it"),
        ("llama", "--num-layers 3", f"--num-layers 3: {OF_MODEL} num_hidden_layers 2; omit it"),
        ("llama", "--model-preset 1.3b", f"--model-preset 1.3b: has num_layers 24, and {OF_MODEL}"),
        ("llama", "--seq-length 65", "must be at most --max-position-embeddings 64 (--max-position-"),
        ("llama", "--use-checkpoint-args", "--load hf:{0} has no arguments, and gives the model"),
    ],
)
def test_flags_that_contradict_the_model_are_refused_with_both_values(
    bpe: Path, tmp_path: Path, family: str, given: str, said: str
) -> None:
    source = directory_of(family, bpe, tmp_path / "theirs")
    error = refusal(started, source, given)
    assert error.startswith("--")
    assert said.format(source, entries(bpe) + SPARE, entries(bpe)) in error


def test_flags_that_repeat_the_model_are_obeyed(bpe: Path, tmp_path: Path) -> None:
    """Whatever name a value has; lengths, dropout and another tokenizer are the run's own."""
    source = directory_of("llama", bpe, tmp_path / "theirs")
    alone = started(source)
    assert alone.model.seq_length == 64
    assert started(source, f"--model-preset {source} --num-layers 2 --normalization rmsnorm") == alone
    files = f"--vocab-file {bpe}/vocab.json --merge-file {bpe}/merges.txt"
    published = replace(ModelConfig(model_preset="345m", seq_length=1024), model_preset=None)
    model = HuggingFaceModel(f"hf:{source}", published, {}, alone.tokenizer)
    argv = "--model-preset 345m --mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --load hf:x".split()
    assert parse_command_line(argv, huggingface=lambda *given: model).config.model == published
    other = started(source, f"--max-position-embeddings 32 --hidden-dropout 0.5 {files}")
    assert (other.model.seq_length, other.model.hidden_dropout) == (32, 0.5)
    assert other.tokenizer.tokenizer_type == "GPT2BPETokenizer"


def started(source: Path, given: str = "") -> Config:
    """The settings of a run that has opened its weights."""
    argv = ["--mock-data", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", *given.split()]
    config = parse_command_line([*argv, "--load", f"hf:{source}"], huggingface=read_settings).config
    open_weights(str(source), config.model, describe(build_tokenizer(config.tokenizer))).close()
    return config


def test_a_tokenizer_of_another_model_is_refused(tool: Callable[..., str], bpe: Path, tmp_path: Path) -> None:
    """No published model has as many rows without a token."""
    chosen = FAMILIES["qwen3"]
    other = type(chosen)(chosen.config, chosen.settings | {"vocab_size": entries(bpe) + 1024})
    source = save(other.model(), bpe, tmp_path / "theirs")
    with pytest.raises(ValueError, match="give the tokenizer of that model"):
        tool("import", source, tmp_path / "ours")
