"""sample as a person runs it."""

import sys
from pathlib import Path

import pytest
import torch

from megatron_zpp.commands import sample
from megatron_zpp.generate.loading import load_model


def texts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: object) -> list[str]:
    """The text below each `--- sample N ---`."""
    monkeypatch.setattr(sys, "argv", ["sample", "--device", "cpu", *map(str, argv)])
    sample.main()
    parts = capsys.readouterr().out.split("--- sample ")
    return [part.partition(" ---\n")[2][:-1] for part in parts[1:]]


def test_each_prompt_gets_its_samples(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--load", checkpoint, "--max-new-tokens", 9]
    found = texts(capsys, monkeypatch, *argv, "--prompt", "a", "The fox", "--num-samples", 3)
    assert len(found) == len(set(found)) == 6
    assert all(text.startswith("a") for text in found[:3])
    assert all(text.startswith("The fox") for text in found[3:])
    again = ["--batch-size", 2, "--prompt", "The fox", "--num-samples", 2]
    assert texts(capsys, monkeypatch, *argv, *again) == found[3:5]
    assert texts(capsys, monkeypatch, *argv, *again, "--seed", 5) != found[3:5]
    assert len(texts(capsys, monkeypatch, *argv)) == 1  # no prompt begins a document


def test_a_prompt_that_is_not_utf_8_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^--prompt caf\\udce9: holds half a surrogate pair, \\udce9; give"):
        texts(capsys, monkeypatch, "--load", checkpoint, "--prompt", "caf\udce9")


def test_temperature_0_is_the_models_choice(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(str(checkpoint), None)
    ids = tokenizer.encode("The fox")
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    flags = ["--load", checkpoint, "--prompt", "The fox", "--temperature", 0, "--max-new-tokens", 5]
    (found,) = texts(capsys, monkeypatch, *flags)
    assert found == tokenizer.decode(ids)
    stop = found[len("The fox") :][1:3]
    (stopped,) = texts(capsys, monkeypatch, *flags, "--stop", stop)
    assert stopped == "The fox" + found[len("The fox") :].split(stop)[0]
