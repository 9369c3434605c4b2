"""A DeepSpeed file in the current directory."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ds.json in the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ds.json"
