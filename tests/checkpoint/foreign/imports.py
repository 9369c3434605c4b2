"""Imports as a person does, and compares the model with what the other program computed."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_zpp.commands import import_checkpoint
from megatron_zpp.generate.loading import load_model

TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "89")  # 90 entries with the end of document


def run_import(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What import_checkpoint prints."""
    monkeypatch.setattr(sys, "argv", ["import_checkpoint", *map(str, argv)])
    import_checkpoint.main()
    return capsys.readouterr().out


def assert_same_logits(imported: Path, reference: Path, tolerance: float = 1e-5) -> None:
    """The model of `imported` gives the logits in `reference`, in fp32."""
    expected = load_file(reference / "logits.safetensors")
    model, tokenizer = load_model(str(imported), None)
    with torch.inference_mode():
        found = model(expected["tokens"])[..., : tokenizer.vocab_size]
    assert expected["logits"].abs().max() > 0.3  # a model of zeros would agree with another
    assert (found - expected["logits"]).abs().max() <= tolerance
