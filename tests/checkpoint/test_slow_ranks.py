"""Saves and loads in which one rank is slow, or does nothing for longer than the time-out."""

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.checkpoint import write
from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.file_worker import FileWorker, Stuck
from megatron_zpp.checkpoint.write import SaveFailed
from megatron_zpp.distributed.exchange import Abandoned, Exchange, NoProgress
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import FIRST, SECOND, save, small
from tests.support import wait_until
from tests.zero.ranks import on_ranks

LONG = timedelta(seconds=5)  # more than a busy machine takes for a write
SHORT = timedelta(seconds=0.6)
STALLED = timedelta(seconds=4)  # a quarter of it is how much sooner than others a rank that is stuck says so
STALL = 8.0  # seconds


def saved_by(topology: Topology, slow: int, stalls: bool, directory: str) -> list[str]:
    """The outcomes of two saves on a rank; in the first one rank `slow` takes longer than the time-out."""
    engine, written = small(topology=topology, zero_stage=3), write.write_shard_file

    def slowly(path: Path, tensors: Any, on_progress: Any) -> Any:
        if topology.rank == slow and FIRST.iteration == int(path.parent.name[5:12]):
            for _ in range(1 if stalls else 100):
                time.sleep(STALL if stalls else 0.1)
                on_progress()
        return written(path, tensors, on_progress)

    write.write_shard_file = slowly
    outcomes, files = [], FileWorker()
    for progress in (FIRST, SECOND):
        outcomes.append("saved")
        timeout = STALLED if stalls and progress is FIRST else LONG
        try:
            save(Path(directory), engine, progress, timeout=timeout, files=files)
        except SaveFailed as failure:
            outcomes[-1] = str(failure)
            time.sleep(STALL)  # the training continues, and the abandoned work ends
    return outcomes


Saved = dict[tuple[int, bool], tuple[Path, Future[list[list[str]]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """By slow rank, and whether it stalls: the directory and `saved_by` of both ranks. They mostly wait."""
    with ThreadPoolExecutor(3) as pool:
        runs = {}
        for slow, stalls in ((1, False), (0, True), (1, True)):
            directory = tmp_path_factory.mktemp("saves")
            runs[slow, stalls] = directory, pool.submit(on_ranks, 2, saved_by, slow, stalls, str(directory))
        yield runs


def test_a_writer_that_makes_progress_may_take_longer_than_the_time_out(saved: Saved) -> None:
    directory, outcomes = saved[1, False]
    assert outcomes.result() == [["saved", "saved"]] * 2
    assert len(candidates(str(directory))) == 2


@pytest.mark.parametrize("slow", [0, 1])
def test_a_writer_that_stalls_fails_one_save_on_all_ranks(saved: Saved, slow: int) -> None:
    directory, future = saved[slow, True]
    outcomes = future.result()
    assert outcomes[0] == outcomes[1]
    assert "progress for 0:00:04" in outcomes[0][0]
    if slow == 1:
        assert "rank 1 " in outcomes[0][0]
    assert outcomes[0][1] == "saved"
    assert [path.name for path in candidates(str(directory))] == ["iter_0000010"]
    assert not list(directory.glob("*.partial"))


def pair() -> tuple[Exchange, Exchange]:
    store = dist.HashStore()
    return tuple(Exchange(store, Topology(rank, 2, rank, 2), SHORT, "x") for rank in (0, 1))


def test_the_first_decision_counts_for_all() -> None:
    one, other = pair()
    assert one.decide("the disk is full") == "the disk is full"
    assert other.decide(None) == "the disk is full"
    with pytest.raises(Abandoned, match="the disk is full"):
        other.get("outcome")
    one, other = pair()
    assert one.decide(None) is None
    assert other.decide("too late") is None
    with pytest.raises(NoProgress):
        other.get("outcome")


def test_work_that_never_returns_is_abandoned() -> None:
    one, _ = pair()
    files, over = FileWorker(), threading.Event()
    started = time.monotonic()
    with pytest.raises(Stuck, match=r"no progress for 0:00:00\.6"):
        files.run(lambda on_progress: over.wait(), one)
    with pytest.raises(Stuck, match="still busy"):
        files.run(lambda on_progress: None, one)
    assert time.monotonic() - started < 20
    over.set()
    wait_until(lambda: not files.busy)
    returned = weakref.ref(files.run(lambda on_progress: torch.ones(1), one))
    wait_until(lambda: returned() is None)  # nothing keeps it
    with pytest.raises(OSError, match="the disk is full"):
        files.run(lambda on_progress: (_ for _ in ()).throw(OSError("the disk is full")), one)
