"""Fixtures of the data tests."""

import os

import pytest

from megatron_zpp.data.open import SplitOpener
from tests.data.format_by_hand import write_by_hand


def open_data(config, *, needed=("train",), **more):
    """Open splits, for samples of 8 tokens below 1,000 unless `more` says otherwise."""
    usual = {"seq_length": 8, "vocab_size": 1000, "seed": 1, "tokenizer_description": None}
    return SplitOpener(config=config, **usual | more).open(needed)


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch):
    """Nothing here has to survive a power cut, and a busy disk takes long for each of many small blocks."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def by_hand(tmp_path):
    """(name, sequences, …) -> prefix of a data set in this test's directory."""

    def write(name, sequences, **format):
        write_by_hand(tmp_path / name, sequences, **format)
        return str(tmp_path / name)

    return write


@pytest.fixture
def text(by_hand):
    """A data set of 100 sequences of 10 tokens; a token identifies its sequence."""
    return by_hand("text", [[number] * 10 for number in range(100)])
