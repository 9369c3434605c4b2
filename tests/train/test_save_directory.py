"""Two runs in one --save, starts from a directory that rotates, checkpoints that are not what they say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.faults.engines import FLAGS
from megatron_zpp.checkpoint.directory import TRACKER
from megatron_zpp.checkpoint.manifest import MARKER
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.lease import LEASE, Holder, Lease
from megatron_zpp.train.resume import checkpoint_arguments, restore
from megatron_zpp.train.setup.run_file import RUN_FILE
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import restored, save, small
from tests.support import Run, pretrain, wait_until
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, Resumed, train_here
from tests.zero.ranks import on_ranks

RUN = ["--split", "100,0,0", *BYTES, *TINY, *SMALLEST]


def test_a_second_run_is_refused_and_a_killed_one_is_not_in_the_way(corpus: str, tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    flags = ["--data-path", corpus, *RUN, "--save", str(save), "--load", str(save)]
    with Run(tmp_path / "first", 1) as first:
        first.start(0, *flags, "--train-iters", "1000000")
        wait_until((save / RUN_FILE).exists)
        process = first.processes[0]
        before = sorted(save.iterdir())
        second = pretrain(*flags, "--train-iters", "3")
        assert second.returncode == 1
        assert f"error: --save {save}: is in use by another run, process {process.pid} on " in second.stderr
        assert second.stderr.count("\n") == 1
        assert sorted(save.iterdir()) == before
        process.kill()
        process.join()
    assert (save / LEASE).exists()
    assert pretrain(*flags, "--train-iters", "3").returncode == 0
    assert not (save / LEASE).exists()


def test_a_run_that_was_taken_over_saves_nothing_more(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "checkpoints"
    flags = ["--data-path", corpus, *RUN, "--save", str(save), "--train-iters", "9"]
    with Lease(save, print, 0.3) as lease:
        other = tmp_path / "other"
        other.write_bytes(Holder.of_this_process().encode())
        os.replace(other, save / LEASE)
        wait_until(lambda: lease.lost)
        ending = train_here([*flags, "--save-interval", "1"], lease=lease)
    assert ending.stop.status == 1
    assert "another run has taken over --save" in str(ending.stop)
    assert [path.name for path in save.iterdir()] == [LEASE]
    assert "was taken over by process" in capsys.readouterr().out


def test_a_checkpoint_that_lost_its_marker_is_named(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = Resumed(corpus, tmp_path)
    resumed("--train-iters", "2", "--save-interval", "1")
    newest = tmp_path / "checkpoints" / "iter_0000002"
    (newest / MARKER).unlink()
    resumed("--train-iters", "1")
    line = f" WARNING: {newest}, which {TRACKER} names, has no COMMITTED, so it is not"
    assert line in capsys.readouterr().out
    assert (newest.parent / TRACKER).read_text() == "1\n"


def test_a_tracker_that_names_an_earlier_checkpoint_is_told(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody has written there to go back, as with Megatron-LM, which loads what it names."""
    resumed = Resumed(corpus, tmp_path)
    resumed("--train-iters", "2", "--save-interval", "1")
    (tmp_path / "checkpoints" / TRACKER).write_text("1\n")
    for told in (1, 0):
        resumed("--train-iters", "3")
        line = f" WARNING: {TRACKER} names iteration 1; the newest counts, and --ckpt-step 1 loads that one"
        assert capsys.readouterr().out.count(line) == told


def test_a_directory_with_another_iterations_name_is_refused(corpus: str, tmp_path: Path) -> None:
    resumed = Resumed(corpus, tmp_path)
    resumed("--train-iters", "2")
    saved = tmp_path / "checkpoints"
    (saved / "iter_0000002").rename(saved / "iter_0000090")
    with pytest.raises(
        ValueError, match="iter_0000090: holds iteration 2, not 90; rename it to iter_0000002"
    ):
        resumed("--train-iters", "2")


def test_a_directory_may_be_spelled_in_two_ways(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be empty at first, and a run that is complete does not save again."""
    flags = ["--data-path", corpus, *RUN, "--train-iters", "2", "--save", str(tmp_path)]
    saves = []
    for _ in range(2):
        train_here([*flags, "--load", f"{tmp_path}/"])
        saves.append(capsys.readouterr().out.count(" saved "))
    assert saves == [1, 0]


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
