"""Fixtures: a byte-level BPE, and a GPT-2 as transformers saves it."""

from pathlib import Path

import pytest

from benchmarks.faults.foreign_files import train_bpe
from tests.checkpoint.huggingface.gpt2 import SOURCE, save, theirs
from tests.tokenizer.test_tokenizers import ORDINARY


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with vocab.json, merges.txt and tokenizer.json of one byte-level BPE."""
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe(directory, [*ORDINARY, SOURCE])
    return directory


@pytest.fixture(scope="module")
def good(bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs(bpe), bpe, tmp_path_factory.mktemp("good") / "gpt2")
