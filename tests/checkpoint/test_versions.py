"""Checkpoints of earlier format versions."""

import json
from pathlib import Path

import pytest

from megatron_zpp.checkpoint import manifest
from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.read import load_checkpoint
from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.data.dataset_progress import DatasetProgress, SourceProgress
from megatron_zpp.storage.checksums import checksums_of
from tests.checkpoint.saving import TOKENIZER, save, small


def test_dataset_progress_of_version_2_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = SourceProgress("a", "", 0, 1.0, 7), SourceProgress("b", "", 1, 3.0, 0)
    progress = Progress(5, 50, dataset_progress=DatasetProgress("windows", 20, sources))
    path = save(tmp_path, small(), progress)
    state = json.loads((path / STATE).read_text())
    data = state["progress"].pop("dataset_progress")
    for entry in data["sets"]:
        entry["given"] = entry.pop("consumed_before")
    state["progress"]["standing"] = data
    (path / STATE).write_text(json.dumps(state))
    files = read_manifest(path) | {STATE: checksums_of(path / STATE)}
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    write_manifest(path, files)
    assert '"format_version": 2' in (path / "manifest.json").read_text()
    found = load_checkpoint(path, small(seed=9), TOKENIZER, with_optimizer=True)
    assert found == progress
