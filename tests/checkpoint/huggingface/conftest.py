"""Fixtures: the command-line tool, a byte-level BPE, and a GPT-2 as transformers saves it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.foreign_files import train_bpe
from megatron_zpp.commands import export_checkpoint, import_checkpoint
from tests.checkpoint.huggingface.gpt2 import SOURCE, save, theirs
from tests.tokenizer.test_tokenizers import ORDINARY


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `megatron-zpp import` or `export` with arguments and return what it prints."""

    def run(command: str, *argv: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"megatron-zpp {command}", *map(str, argv)])
        capsys.readouterr()
        (import_checkpoint if command == "import" else export_checkpoint).main()
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with vocab.json, merges.txt and tokenizer.json of one byte-level BPE."""
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe(directory, [*ORDINARY, SOURCE])
    return directory


@pytest.fixture(scope="module")
def good(bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs(bpe), bpe, tmp_path_factory.mktemp("good") / "gpt2")
