"""Whole runs on two nodes of which one rank is killed: all others say so, before heartbeats could."""

import platform
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.setup import ranks
from tests.support import Run, nightly, wait_until

NODE = 2  # ranks per node; there are two nodes
PROMPT = 2  # seconds from a kill to the last rank's line
TRIES = 3  # other programs may delay some kills; without lifelines all are late
# Heartbeats would find a silent rank after four seconds at the earliest, with another text.
LINE = "has ended without a word: killed, or crashed; last seen: "
MOMENTS = {
    "start": "--eval-iters 0",
    "step": "--eval-iters 0",
    "save": "--eval-iters 0 --save-interval 1 --keep-last 2",
    "evaluation": "--eval-iters 100000",
}
KILLS = [("start", 0), ("step", 1), nightly("start", 3), nightly("step", 2), nightly("save", 0)]
KILLS += [nightly("save", 3), nightly("evaluation", 1), nightly("evaluation", 2)]


def await_moment(moment: str, run: Run, saves: Path) -> None:
    if moment == "start":
        wait_until((saves.parent / "joins").exists)
        return
    run.wait_for("starting from initial weights")
    if moment == "evaluation":
        time.sleep(0.5)
        return
    run.wait_for("iteration        3/")
    if moment == "save":
        before = set(saves.iterdir())
        wait_until(lambda: set(saves.iterdir()) - before)


def join_for_ever(file: Path) -> None:
    """All ranks wait before they join; rank 0 makes a file when all are connected."""

    def wait(config: object, topology: Topology, device: object, met: Rendezvous) -> None:
        while not (met.lifelines and met.lifelines.complete):
            time.sleep(0.01)
        if topology.rank == 0:
            file.touch()
        time.sleep(1000)

    ranks.process_group = wait


def kill(victim: int, run: Run) -> float:
    """Seconds until all ranks but the victim have written one line that says what ended it; all end."""
    killed = time.time()  # the clock of files
    run.send(victim, signal.SIGKILL)
    assert run.statuses() == {rank: -9 if rank == victim else 1 for rank in range(2 * NODE)}
    others = set(range(2 * NODE)) - {victim}
    host = platform.node()
    for rank in others:
        beginning = f"pretrain_gpt.py [{host} rank {rank}]: error: rank {victim} [{host}] "
        (line,) = run.err(rank).splitlines()
        assert line.startswith(f"{beginning}{LINE}")
    return max(run.said_at(rank) for rank in others) - killed


def killed_at(moment: str, victim: int, flags: list[str], directory: Path) -> float:
    """A run whose rank `victim` is killed; the seconds of `kill`."""
    saves = directory / "saves"
    with Run(directory / "log", 2 * NODE) as run:
        for rank in range(2 * NODE):
            place = {"LOCAL_RANK": str(rank % NODE), "LOCAL_WORLD_SIZE": str(NODE)}
            save = ["--save", str(saves)] if moment == "save" else []
            change = partial(join_for_ever, directory / "joins") if moment == "start" else None
            run.start(rank, *flags, *save, change=change, **place)
        await_moment(moment, run, saves)
        return kill(victim, run)


@pytest.mark.parametrize(("moment", "victim"), KILLS)
def test_all_ranks_name_a_killed_one_at_once(
    moment: str, victim: int, flags: list[str], tmp_path: Path
) -> None:
    flags = [*flags, "--global-batch-size", "16", "--train-iters", "100000", *MOMENTS[moment].split()]
    flags += ["--num-workers", "1"]  # a fork of the rank, which outlives it for a moment
    tries = (killed_at(moment, victim, flags, tmp_path / str(number)) for number in range(TRIES))
    assert any(seconds < PROMPT for seconds in tries)
