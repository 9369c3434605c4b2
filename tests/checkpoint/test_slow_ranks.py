"""Saves and loads in which one rank is slow, or does nothing for longer than the time-out."""

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
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

TIMEOUT = timedelta(seconds=0.6)


def saved_by(topology: Topology, slow: int, pause: float, directory: str) -> list[str]:
    """The outcomes of two saves on a rank; in the first one rank `slow` takes 1.5 s, in steps of `pause`."""
    engine, written = small(topology=topology, zero_stage=3), write.write_shard_file

    def slowly(path: Path, tensors: Any, on_progress: Any) -> Any:
        if topology.rank == slow and FIRST.iteration == int(path.parent.name[5:12]):
            for _ in range(int(1.5 / pause)):
                time.sleep(pause)
                on_progress()
        return written(path, tensors, on_progress)

    write.write_shard_file = slowly
    outcomes, files = [], FileWorker()
    for progress in (FIRST, SECOND):
        outcomes.append("saved")
        try:
            save(Path(directory), engine, progress, timeout=TIMEOUT, files=files)
        except SaveFailed as failure:
            outcomes[-1] = str(failure)
            time.sleep(2)  # the training continues, and the abandoned work ends
    return outcomes


@pytest.mark.parametrize("slow", [0, 1])
def test_a_writer_that_makes_progress_may_take_longer_than_the_time_out(tmp_path: Path, slow: int) -> None:
    assert on_ranks(2, saved_by, slow, 0.1, str(tmp_path)) == [["saved", "saved"]] * 2
    assert len(candidates(str(tmp_path))) == 2


@pytest.mark.parametrize("slow", [0, 1])
def test_a_writer_that_stalls_fails_one_save_on_all_ranks(tmp_path: Path, slow: int) -> None:
    outcomes = on_ranks(2, saved_by, slow, 1.5, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    assert "progress for 0:00:00.6" in outcomes[0][0]
    if slow == 1:
        assert "rank 1 " in outcomes[0][0]
    assert outcomes[0][1] == "saved"
    assert [path.name for path in candidates(str(tmp_path))] == ["iter_0000010"]
    assert not list(tmp_path.glob("*.partial"))


def pair() -> tuple[Exchange, Exchange]:
    store = dist.HashStore()
    return tuple(Exchange(store, Topology(rank, 2, rank, 2), TIMEOUT, "x") for rank in (0, 1))


def test_the_first_decision_counts_for_all() -> None:
    one, other = pair()
    assert one.abandon("the disk is full") == "the disk is full"
    assert other.commit() == "the disk is full"
    with pytest.raises(Abandoned, match="the disk is full"):
        other.get("outcome")
    one, other = pair()
    assert one.commit() is None
    assert other.abandon("too late") is None
    with pytest.raises(NoProgress):
        other.get("outcome")


def test_a_silent_rank_is_named() -> None:
    one, _ = pair()
    one.put("written/0", None)
    with pytest.raises(NoProgress, match=r"rank 1 reported no progress for 0:00:00\.6"):
        one.gather("written")


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
    assert files.run(lambda on_progress: "done", one) == "done"
    with pytest.raises(OSError, match="the disk is full"):
        files.run(lambda on_progress: (_ for _ in ()).throw(OSError("the disk is full")), one)
