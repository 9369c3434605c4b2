"""A sharded checkpoint of a small GPT, read as ours and as transformers' GPT-2, and a tokenizer of bytes."""

import os
from pathlib import Path

import torch
import transformers

from megatron_zpp.model.gpt import GPT
from tests.faults.site import train_bpe
from tests.model.test_gpt import names_in_transformers
from tests.support import pretrain

LAYERS, POSITIONS, TRAINED = 2, 32, 24
PROMPTS = ["The quick brown fox", "a", "def main(self):\n    return", "jumps over"]
SHAPE = f"--num-layers {LAYERS} --hidden-size 48 --num-attention-heads 4 --seq-length {TRAINED}".split()
# Wide initial weights: an untrained model of the usual ones finds all tokens about equally likely.
WIDE = f"--max-position-embeddings {POSITIONS} --init-method-std 0.3".split()
STEPS = "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data".split()


def make_checkpoint(directory: Path) -> Path:
    """Trains two steps on two ranks at stage 3, and returns where it was saved."""
    train_bpe(directory, [f"{text} {__doc__}" for text in PROMPTS])
    words = [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(directory / "tokenizer.json"),
    ]
    save = directory / "checkpoints"
    parts = [*SHAPE, *WIDE, *STEPS, *words, "--save", str(save), "--zero-stage", "3", "--device", "cpu"]
    done = pretrain(*parts, processes=2)
    assert done.returncode == 0, done.stderr
    return save


def as_transformers(ours: GPT, positions: int = POSITIONS) -> transformers.GPT2LMHeadModel:
    """The same weights in transformers' model, with zeros for positions that ours does not have."""
    config = transformers.GPT2Config(
        vocab_size=ours.vocab_size,
        n_positions=positions,
        n_embd=ours.config.hidden_size,
        n_layer=ours.config.num_layers,
        n_head=ours.config.num_attention_heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    weights = theirs.state_dict()
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
        for name, parameter in ours.named_parameters():
            their_name, transposed = names_in_transformers(ours.config.num_layers)[name]
            weight = weights[their_name]
            value = parameter.T if transposed else parameter[: len(weight)]
            weight[: len(value)] = value
    return theirs


def quiet() -> None:
    """Keeps transformers from telling of progress."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    transformers.logging.set_verbosity_error()
