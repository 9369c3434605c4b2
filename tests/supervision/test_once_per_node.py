"""One of a node's ranks says what several have to say, and before a launcher ends them."""

import fcntl
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision import once_per_node
from megatron_zpp.supervision.once_per_node import Say, say_here, say_once
from tests.config.command_line import SMALLEST
from tests.support import Run, wait_until

RANKS = 4
REFUSED = [*SMALLEST, "--bf16", "--fp16"]
LINE = "pretrain_gpt.py: error: --fp16 (given): contradicts --bf16; give one"


@pytest.mark.parametrize(("late", "launcher_ends_ranks"), [(0, True), (3, False)], ids=["torchrun", "srun"])
def test_a_refused_command_line_is_said_once(tmp_path: Path, late: int, launcher_ends_ranks: bool) -> None:
    """torchrun sends SIGTERM to the others when one has exited; srun's tasks are independent."""
    go = tmp_path / "go"
    with Run(tmp_path, RANKS) as run:
        for rank in range(RANKS):
            run.start(rank, *REFUSED, change=partial(begin, go, 0.3 * (rank == late)))
        go.touch()  # imports take longer than a launcher's start of all ranks
        if launcher_ends_ranks:
            wait_until(lambda: any(rank.exitcode is not None for rank in run.processes.values()))
            for process in run.processes.values():
                if process.exitcode is None:
                    process.terminate()
        assert set(run.statuses().values()) <= {2, -signal.SIGTERM}
        assert run.errors() == [LINE]


def begin(go: Path, later: float) -> None:
    wait_until(go.exists)
    time.sleep(later)


def test_a_rank_with_a_different_error_prints_it_too(tmp_path: Path) -> None:
    with Run(tmp_path, 2) as run:
        run.start(0, *REFUSED)
        run.start(1, "--no-such-flag", *REFUSED)
        assert run.statuses() == {0: 2, 1: 2}
        assert len(run.errors()) == 2


Said = Callable[..., int]


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    """How often a line was printed since the last call."""

    def say(node: Say, topic: str = "topic") -> int:
        node(topic, "line")
        return capfd.readouterr().err.count("line\n")

    return say


def test_an_error_of_an_earlier_start_is_printed_again(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = (partial(say_once, job, directory=tmp_path) for job in ("job", "another job"))
    assert [said(node), said(node), said(other), said(other), said(node, "more")] == [1, 0, 1, 0, 1]
    monkeypatch.setattr(once_per_node, "process_started", partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    assert said(node) == 1  # by a process that begins after it was said
    monkeypatch.undo()
    (file,) = tmp_path.iterdir()
    claims = [line.split() for line in file.read_text().splitlines()]
    file.write_text("".join(f"{float(when) + 10**6} {key}\n" for when, key in claims) + "cut")
    assert [said(node), said(node)] == [1, 0]  # the machine was rebooted, so its clock restarted
    assert len(file.read_text().splitlines()) == 1  # nothing old is kept


def test_every_rank_prints_where_other_users_can_write_the_lock(said: Said, tmp_path: Path) -> None:
    node = partial(say_once, "job", directory=tmp_path)
    assert [said(node), said(node)] == [1, 0]
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    assert said(node) == 1
    file.chmod(0o600)
    assert said(node) == 0
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert said(node) == 1
    file.unlink()
    os.mkfifo(file, 0o600)
    assert said(node) == 1
    assert said(partial(say_once, "job", directory=tmp_path / "missing")) == 1


def test_a_held_lock_silences_no_rank(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = partial(say_once, "job", directory=tmp_path)
    assert said(node) == 1
    monkeypatch.setattr(once_per_node, "_LOCK_SECONDS", 0.05)
    (file,) = tmp_path.iterdir()
    with open(file) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert said(node) == 1


def test_a_rank_that_is_alone_on_its_node_asks_nobody() -> None:
    environment = {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    assert once_per_node.once_per_node(Topology(1, 2, 0, 1), {}) is say_here
    topologies = (Topology(rank, 4, rank % 2, 2) for rank in range(3))
    first, second, third = (once_per_node.once_per_node(each, environment).args for each in topologies)
    assert first == second != third
