"""Who ended a run: judged from beats alone, and by real ranks of which one is killed, stopped or stuck."""

import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.train.beats import Beat, Judge
from megatron_zpp.train.errors import one_line_errors
from megatron_zpp.train.heartbeat import heartbeat
from megatron_zpp.zero.process_group import process_group
from megatron_zpp.zero.topology import Topology
from tests.support import free_port, wait_until

TIMEOUT = 3.0


def beat(rank: int, count: int = 1, **changes: object) -> Beat:
    values = {"doing": "step 7", "marks": 10, "seconds": 0.0, "patient": False, **changes}
    return Beat(rank=rank, host=f"host{rank}", count=count, **values)


def test_the_judge_names_who_is_silent_failed_or_stuck() -> None:
    judge = Judge(timeout=60, patience=3)
    judge.see([beat(0), beat(1), None], 100)
    judge.see([beat(0, 2), beat(1), None], 160)
    assert judge.lost([beat(0, 2), beat(1), None]) is None
    judge.see([beat(0, 3), beat(1), None], 161)
    assert (
        judge.lost([beat(0, 3), beat(1), None])
        == "rank 1 [host1] has been silent for 61 s; last seen: step 7"
    )
    judge.see([beat(0, 4), beat(1, 2), None], 162)
    everyone = [beat(0, 4), beat(1, 2, left=True), None]
    assert judge.lost(everyone) == "rank 2 has been silent for 62 s; last seen: starting"
    judge.see([beat(0, 5), beat(1, 2), beat(2)], 166)
    assert judge.lost([beat(0, 5), beat(1, 2), beat(2)]) is None
    assert "rank 1 [host1] has been silent for 4 s" in judge.lost(
        [beat(0, 5, asks=True), beat(1, 2), beat(2)]
    )
    assert judge.lost([beat(0), beat(1), beat(2, failed="no memory")]) == "rank 2 [host2] failed: no memory"


def test_the_rank_with_the_fewest_marks_is_stuck_and_not_those_that_wait_for_it() -> None:
    judge = Judge(timeout=60, patience=3)
    waiting = [beat(0, seconds=61), beat(2, seconds=61)]
    assert "rank 1 [host1] stuck for 61 s" in judge.stuck([*waiting, beat(1, marks=9, seconds=61)])
    assert judge.stuck([*waiting, beat(1, marks=9, seconds=5)]) is None  # slow, not stuck
    assert judge.stuck([*waiting, beat(1, marks=9, seconds=61, patient=True)]) is None  # saves, say
    assert "rank 0 [host0] and rank 2 [host2] stuck" in judge.stuck([*waiting, beat(1, marks=9, left=True)])
    assert judge.stuck([None]) is None


def test_a_beat_survives_the_store() -> None:
    there = beat(3, failed='quoted "text"', asks=True)
    assert Beat.decode(there.encode().encode()) == there
    assert Beat.decode(b"null") is None


@pytest.mark.parametrize("timeout", [600, 1e9])
def test_a_heartbeat_that_comes_after_the_collectives_give_up_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"--heartbeat-timeout .* --distributed-timeout-minutes 10"):
        DistributedConfig(heartbeat_timeout=timeout)


def rank_main(directory: str, rank: int, world: int, port: int, ending: str) -> None:
    """Steps of one small collective each, until a file of the test's says otherwise."""
    place = Path(directory)
    torch.set_num_threads(1)
    with open(place / f"{rank}.err", "w") as err:
        os.dup2(err.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    topology = Topology(rank, world, rank, world)
    config = DistributedConfig(heartbeat_timeout=TIMEOUT, distributed_backend="gloo")
    with (
        one_line_errors("test", topology, debug=False, every_rank=True),
        process_group(config, topology, torch.device("cpu")) as store,
        heartbeat(store, topology, config.heartbeat_timeout, "test") as activity,
    ):
        for step in range(10**9):
            activity.now(f"step {step}")
            total = torch.tensor([float((place / "end").exists())])
            if world > 1:
                dist.all_reduce(total)
            (place / f"{rank}.steps").write_text(str(step))
            if total.item():
                break
            activity.now("thinking")
            time.sleep(1000 if (place / f"stick{rank}").exists() else 0.01)
        if ending == "raise" and rank == world - 1:
            raise ValueError("token 5 is outside")
        activity.now("wait", patient=True)
        time.sleep(0.5 * rank if ending == "leave one after another" else 0.0)
        if ending == "raise":
            dist.barrier()


@contextmanager
def ranks(directory: Path, world: int, ending: str = "leave") -> Iterator[list[multiprocessing.Process]]:
    """Processes that have beaten since their first step; forked from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tests.train.test_heartbeat"])
    port = free_port()
    processes = [
        context.Process(target=rank_main, args=(str(directory), rank, world, port, ending))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for rank in range(world):
            steps = directory / f"{rank}.steps"
            wait_until(lambda steps=steps: steps.exists() and int(steps.read_text() or 0) > 120)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def line_of(directory: Path, rank: int) -> str:
    """What a rank said at its end; torch's own warnings of a store that is gone may come before it."""
    said = (directory / f"{rank}.err").read_text().splitlines()
    assert sum(line.startswith("test") for line in said) == 1, said
    return said[-1]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_name_a_rank_that_is_gone(tmp_path: Path, fault: signal.Signals, victim: int) -> None:
    """Rank 0 keeps the store as well; the other two end with the line, in time."""
    with ranks(tmp_path, 3) as processes:
        os.kill(processes[victim].pid, fault)
        started = time.monotonic()
        survivors = [rank for rank in range(3) if rank != victim]
        for rank in survivors:
            processes[rank].join(30)
            assert processes[rank].exitcode == 1
            line = line_of(tmp_path, rank)
            assert line.startswith(
                f"test [{platform.node()} rank {rank}]: error: rank {victim} [{platform.node()}]"
            )
            assert "last seen: step " in line or "last seen: thinking" in line
        assert time.monotonic() - started < 3 * TIMEOUT


@pytest.mark.parametrize(("world", "victim"), [(1, 0), (3, 0), (3, 2)])
def test_a_rank_that_is_stuck_ends_the_run(tmp_path: Path, world: int, victim: int) -> None:
    with ranks(tmp_path, world) as processes:
        (tmp_path / f"stick{victim}").touch()
        for rank, process in enumerate(processes):
            process.join(30)
            assert process.exitcode == 1
            line = line_of(tmp_path, rank)
            assert f"error: rank {victim} [{platform.node()}] stuck for 3 s; last seen: thinking" in line


def test_a_rank_tells_the_others_of_its_error(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, "raise") as processes:
        (tmp_path / "end").touch()
        for rank, process in enumerate(processes):
            process.join(30)
            assert process.exitcode == 1
            failed = "" if rank == 2 else f"rank 2 [{platform.node()}] failed: "
            assert line_of(tmp_path, rank).endswith(f"error: {failed}token 5 is outside")


@pytest.mark.parametrize("world", [1, 3])
def test_an_orderly_end_is_silent(tmp_path: Path, world: int) -> None:
    """Though ranks end one after another, and the first of them keeps the store."""
    with ranks(tmp_path, world, "leave one after another") as processes:
        (tmp_path / "end").touch()
        for rank, process in enumerate(processes):
            process.join(30)
            assert (process.exitcode, (tmp_path / f"{rank}.err").read_text()) == (0, "")
