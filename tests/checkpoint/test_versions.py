"""Checkpoints of earlier format versions."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint import manifest
from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.read import CheckpointReader, load_checkpoint, saved_settings
from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.checkpoint.write import STATE
from megatron_zpp.data.dataset_progress import DatasetProgress, SourceProgress
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import checksums_of
from tests.checkpoint.saving import TOKENIZER, save, small, train
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks


def test_dataset_progress_of_version_2_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = SourceProgress("a", "", 0, 1.0, 7), SourceProgress("b", "", 1, 3.0, 0)
    progress = Progress(5, 50, dataset_progress=DatasetProgress("windows", 20, sources))
    path = save(tmp_path, small(), progress)
    state = json.loads((path / STATE).read_text())
    data = state["progress"].pop("dataset_progress")
    for entry in data["sets"]:
        entry["given"] = entry.pop("consumed_before")
    state["progress"]["standing"] = data
    rewrite(path, state, 2, monkeypatch)
    found = load_checkpoint(path, small(seed=9), TOKENIZER, with_optimizer=True)
    assert found == progress


@pytest.mark.parametrize(("version", "younger"), [(3, ["tensor", "nodes"]), (4, ["tensor"])])
@pytest.mark.parametrize("tensor", [1, 2])
def test_versions_without_tensor_ranks_are_read_by_any_number_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, younger: list[str], tensor: int
) -> None:
    engine = small()
    train(engine, 2, seed=2)
    path = save(tmp_path, engine)
    state = json.loads((path / STATE).read_text())
    for key in younger:
        del state[key]
    rewrite(path, state, version, monkeypatch)
    wanted = {name: weight.flatten().tolist() for name, weight in weights_of(engine).items()}
    for found in on_ranks(tensor, load_shared, str(path)):
        assert found == wanted
    with CheckpointReader(path) as reader:
        assert {name: whole.flatten().tolist() for name, whole in reader.parameters().items()} == wanted
    assert saved_settings(path)[1] == 1


def load_shared(topology: Topology, path: str) -> dict[str, list[float]]:
    engine = small(seed=9, topology=topology, tensor=topology.world_size, zero_stage=3)
    load_checkpoint(Path(path), engine, TOKENIZER, with_optimizer=True)
    return {name: weight.flatten().tolist() for name, weight in weights_of(engine).items()}


def rewrite(path: Path, state: dict[str, Any], version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write another state.json and the manifest of a version."""
    (path / STATE).write_text(json.dumps(state))
    files = read_manifest(path) | {STATE: checksums_of(path / STATE)}
    monkeypatch.setattr(manifest, "FORMAT_VERSION", version)
    write_manifest(path, files)
    assert f'"format_version": {version}' in (path / "manifest.json").read_text()
