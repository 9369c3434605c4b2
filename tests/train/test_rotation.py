"""Starts from the directory of another run, which saves and removes checkpoints meanwhile (--keep-last)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.faults.engines import FLAGS
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.resume import checkpoint_arguments, restore
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import restored, save, small
from tests.zero.ranks import on_ranks


def saved_by_another_run(directory: Path, engine: ZeroEngine) -> None:
    """Iterations 3 and 5; 6, which is saved later, is out of sight. Every rank must call it."""
    for iteration in (3, 5, 6):
        save(directory, engine, Progress(iteration, iteration), config=parse_args(FLAGS).to_json())
    if engine.topology.rank == 0:
        (directory / "iter_0000006").rename(directory / "later")
    if engine.topology.world_size > 1:
        dist.barrier()


def rotate(directory: Path) -> None:
    """Save iteration 6, and remove the others."""
    if (directory / "later").exists():
        (directory / "later").rename(directory / "iter_0000006")
        for iteration in (3, 5):
            name = f"iter_{iteration:07d}"
            (directory / name).rename(directory / f"{name}.partial")


def before(directory: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    def rotated(*arguments: Any, **named: Any) -> Any:
        rotate(directory)
        return call(*arguments, **named)

    return rotated


def resume(topology: Topology, directory: str) -> tuple[int, list[str]]:
    """The iteration that a rank resumes from, and the warnings; the last rank's first load comes too late."""
    engine = small(topology=topology, zero_stage=3)
    saved_by_another_run(Path(directory), engine)
    load = restore.load_checkpoint
    if topology.rank == topology.world_size - 1:
        restore.load_checkpoint = before(Path(directory), load)
    try:
        start = restored(engine, "--load", directory)
    finally:
        restore.load_checkpoint = load
    return start.progress.iteration, [line for line in start.lines if "WARNING" in line]


def test_ranks_resume_from_the_same_checkpoint_of_a_directory_that_rotates(tmp_path: Path) -> None:
    assert on_ranks(2, resume, str(tmp_path)) == [(6, []), (6, [])]


def test_arguments_are_those_of_the_newest_of_a_directory_that_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by_another_run(tmp_path, small())
    monkeypatch.setattr(checkpoint_arguments, "CheckpointReader", before(tmp_path, CheckpointReader))
    found = checkpoint_arguments.read_arguments(str(tmp_path), None)
    assert found.name == str(tmp_path / "iter_0000006")
