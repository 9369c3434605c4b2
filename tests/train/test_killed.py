"""Whole runs on two nodes of which one rank is killed: all others say so, before heartbeats could."""

import os
import platform
import signal
import time
from pathlib import Path

import pytest

from tests.support import Run, wait_until

NODE = 2  # ranks per node; there are two nodes
# Heartbeats would find a silent rank after four seconds at the earliest, with another text.
LINES = ("was killed by SIGKILL; last seen: ", "has ended without a word: killed, or crashed; last seen: ")
MOMENTS = {
    "start": "--eval-iters 0",
    "step": "--eval-iters 0",
    "save": "--eval-iters 0 --save-interval 1 --keep-last 2",
    "evaluation": "--eval-iters 100000",
}
KILLS = [
    pytest.param(moment, rank, marks=() if rank == number else pytest.mark.nightly)
    for number, moment in enumerate(MOMENTS)
    for rank in range(2 * NODE)
]


def await_moment(moment: str, run: Run, saves: Path) -> None:
    if moment == "start":
        store = f"{int(run.port):04X}"  # proc(5): the port of a connection in /proc/net/tcp
        wait_until(lambda: connections_to(store) >= 2 * NODE)
        return
    run.wait_for("starting from initial weights")
    if moment == "evaluation":
        time.sleep(0.5)
        return
    run.wait_for("iteration        3/")
    if moment == "save":
        before = set(saves.iterdir())
        wait_until(lambda: set(saves.iterdir()) - before)


def connections_to(port: str) -> int:
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port}") and row[3] == "01" for row in rows)


@pytest.mark.parametrize(("moment", "victim"), KILLS)
def test_all_ranks_name_a_killed_one(moment: str, victim: int, flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, "--global-batch-size", "16", "--train-iters", "100000", *MOMENTS[moment].split()]
    flags += ["--num-workers", "1"]  # a fork of the rank, which outlives it for a moment
    saves = tmp_path / "saves"
    with Run(tmp_path / "log", 2 * NODE) as run:
        for rank in range(2 * NODE):
            place = {"LOCAL_RANK": str(rank % NODE), "LOCAL_WORLD_SIZE": str(NODE)}
            run.start(rank, *flags, *(["--save", str(saves)] if moment == "save" else []), **place)
        await_moment(moment, run, saves)
        os.kill(run.processes[victim].pid, signal.SIGKILL)
        begin = time.monotonic()
        assert run.statuses() == {rank: -9 if rank == victim else 1 for rank in range(2 * NODE)}
        print(f"{time.monotonic() - begin:.2f} s until the last rank has ended")
        host = platform.node()
        for rank in set(range(2 * NODE)) - {victim}:
            beginning = f"pretrain_gpt.py [{host} rank {rank}]: error: rank {victim} [{host}] "
            (line,) = run.err(rank).splitlines()
            assert line.startswith(tuple(f"{beginning}{text}" for text in LINES))
