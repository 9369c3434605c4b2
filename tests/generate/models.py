"""Sharded checkpoints of small models, read as ours and as transformers', and a tokenizer of bytes."""

from pathlib import Path

import torch
import transformers

from benchmarks.faults.foreign_files import train_bpe
from megatron_zpp.checkpoint.huggingface.names import names_of
from megatron_zpp.config.shapes.huggingface_export import huggingface_values
from megatron_zpp.model.gpt import GPT
from tests.support import trained

LAYERS, POSITIONS, TRAINED = 2, 32, 24
PROMPTS = ["The quick brown fox", "a", "def main(self):\n    return", "jumps over"]
SHAPE = f"--num-layers {LAYERS} --hidden-size 48 --num-attention-heads 4 --seq-length {TRAINED}".split()
# Wide initial weights: an untrained model of the usual ones finds all tokens about equally likely.
WIDE = f"--max-position-embeddings {POSITIONS} --init-method-std 0.3".split()
MODELS = {  # flags beside those
    "gpt2": [],
    "llama": (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--qk-layernorm --kv-channels 10 --group-query-attention --num-query-groups 2 "
        "--untie-embeddings-and-output-weights --window-size 6,0 --window-attn-skip-freq 2"
    ).split(),
}
STEPS = "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data".split()


def make_checkpoint(directory: Path, model: str = "gpt2", *flags: str) -> Path:
    """Train one of MODELS for two steps on two ranks at stage 3; return where it was saved."""
    train_bpe(directory, [f"{text} {__doc__}" for text in PROMPTS])
    words = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {directory}/tokenizer.json".split()
    save = directory / "checkpoints"
    parts = [*SHAPE, *WIDE, *MODELS[model], *STEPS, *words]
    parts += ["--save", str(save), "--zero-stage", "3", "--device", "cpu", *flags]
    trained(*parts, processes=2)
    return save


def as_transformers(ours: GPT) -> "transformers.PreTrainedModel":
    """The same weights in transformers' model."""
    values = huggingface_values(ours.config, ours.vocab_size, 0)
    config = transformers.AutoConfig.for_model(**values)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    weights, names = theirs.state_dict(), names_of(ours.config, values["model_type"])
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            found = names.tensors(name, tuple(parameter.shape), ours.config)
            for tensor, part in zip(found, parameter.split([each.rows for each in found]), strict=True):
                weight = weights[names.with_prefix(tensor.name)]
                weight.copy_(part.T if tensor.transposed else part[: len(weight)])
    return theirs
