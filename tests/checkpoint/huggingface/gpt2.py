"""Small GPT-2s of transformers, and the files and logits that tests compare."""

import inspect
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

SOURCE = inspect.getsource(inspect)
SHAPE = {"n_positions": 19, "n_embd": 20, "n_layer": 2, "n_head": 4}  # no size that anything is padded to
SHAPE_FLAGS = (
    "--num-layers 2 --hidden-size 20 --num-attention-heads 4 --seq-length 19 --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --micro-batch-size 2 --eval-iters 1 --num-workers 0"
).split()


def entries(bpe: Path) -> int:
    return len(json.loads((bpe / "vocab.json").read_text()))


def theirs(bpe: Path, **settings: object) -> "transformers.GPT2LMHeadModel":
    """A GPT-2 in which no parameter is zero or one, with as many entries as the tokenizer."""
    torch.manual_seed(7)
    defaults = {"vocab_size": entries(bpe), "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**defaults | SHAPE | settings)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def save(model: nn.Module, bpe: Path, directory: Path, **how: object) -> Path:
    model.save_pretrained(directory, **how)
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        shutil.copyfile(bpe / name, directory / name)
    return directory


def tensors(directory: Path) -> dict[str, Tensor]:
    """All of a directory, from one file or more."""
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
