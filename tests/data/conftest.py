"""Fixtures of the data tests."""

import os

import pytest

from tests.data.format_by_hand import write_by_hand


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
