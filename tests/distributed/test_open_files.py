"""Open files of the process that keeps the store: its limit is raised, and its connections are counted."""

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint import write
from megatron_zpp.distributed import exchange
from megatron_zpp.distributed.open_files import STORE_CONNECTIONS, reserve_connections
from tests.config.command_line import SMALLEST
from tests.support import Run, nightly

SOFT, HARD = 256, 1024
FLAGS = [*SMALLEST, *"--train-iters 60 --eval-iters 1 --device cpu".split()]
ESTABLISHED = "01"  # linux/tcp_states.h


def lower_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))


@pytest.fixture
def keeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a low limit, as torchrun's may be."""
    with subprocess.Popen(["sleep", "600"], preexec_fn=lower_limit) as process:
        yield process
        process.kill()


def test_a_low_limit_is_reported_and_an_impossible_one_is_refused(keeper: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    reserve_connections(keeper.pid, 153, said.append)  # 5 * 153 + 256 = 1021
    assert said == []
    assert resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE) == (HARD, HARD)
    reserve_connections(keeper.pid, 154, said.append)
    (line,) = said
    assert line.startswith(f"warning: ulimit -n {HARD}: process {keeper.pid} on ")
    assert "which hosts the store of 154 ranks, needs 1026 open files" in line
    assert "raise the hard limit (ulimit -Hn)" in line
    reserve_connections(keeper.pid, HARD // 2, said.append)
    with pytest.raises(ValueError, match=rf"^ulimit -n {HARD}: process .* 513 ranks, needs 2821 open files"):
        reserve_connections(keeper.pid, HARD // 2 + 1, said.append)


def connections(port: int) -> int:
    """Connections that a server at `port` has accepted."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    fields = [line.split() for line in lines]
    return sum(row[3] == ESTABLISHED and row[1].endswith(f":{port:04X}") for row in fields)


def slow_storage() -> None:
    """Storage that takes longer than ranks wait before they tell of their progress."""
    write_shard_file = write.write_shard_file

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.1)
        result = write_shard_file(*arguments)
        time.sleep(0.5)
        return result

    exchange._REPORT_EVERY = 0.02
    write.write_shard_file = slowly
    lower_limit()


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ("--save-interval 5", lower_limit),
        nightly("--save-interval 1 --keep-last 1 --async-save --train-iters 6", slow_storage),
    ],
)
def test_ranks_open_no_more_connections_than_estimated(
    tmp_path: Path, flags: str, change: Callable[[], None]
) -> None:
    """A rank raises its own limit too, which would otherwise be too low here."""
    most, limits, save = 0, set(), str(tmp_path / "checkpoints")
    saving = ("--save", save, "--load", save, *flags.split())
    with Run(tmp_path, 2) as run:
        for rank in range(2):
            run.start(rank, *FLAGS, *saving, change=change)
        processes = list(run.processes.values())
        while all(process.exitcode is None for process in processes):
            most = max(most, connections(int(run.port)))
            with suppress(ProcessLookupError):  # it has just ended
                if most > 2:  # past the start
                    limits.add(resource.prlimit(processes[1].pid, resource.RLIMIT_NOFILE))
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
    assert 2 * 2 <= most <= 2 * STORE_CONNECTIONS + 1  # rank 0 has one more, to see that the store is there
    assert limits == {(HARD, HARD)}


def test_a_store_without_room_for_all_ranks_is_refused_before_it_starts(tmp_path: Path) -> None:
    with Run(tmp_path, 400) as run:
        run.start(0, *FLAGS, change=lower_limit)
        assert run.statuses() == {0: 1}
        (line,) = run.errors()
    assert f"error: ulimit -n {HARD}: this process on {os.uname().nodename}" in line
    # 5 * 400 connections to the store, 399 lifelines, 256 others
    assert "which hosts the store of 400 ranks, needs 2655 open files" in line
