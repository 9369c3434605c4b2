"""Starts ranks of pretrain_gpt.py by forking from a process that has imported everything: in milliseconds.

The ranks are processes like any others: own pid, own gloo connections, own exit status. What starts them must
have no threads and no process group.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

import sentencepiece  # noqa: F401 - what runs import where they use it
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401 - torch itself does at the first step

import megatron_zpp.commands.pretrain  # noqa: F401 - what the ranks run
import pretrain_gpt
from tests.support import free_port

gc.freeze()  # a fork then need not copy what its collector would only look at


def fork(run: Callable[[], None], out: Path, err: Path) -> ForkProcess:
    """A child that runs `run` and writes to these files, or this one; a SystemExit is its status."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(run, out, err))
    process.start()
    return process


def _run(run: Callable[[], None], out: Path, err: Path) -> None:
    os.setpgid(0, 0)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    run()


class Job:
    """The ranks of one run of pretrain_gpt.py; `environment` replaces that of this process.

    A node has `local` ranks, all of them without it. Each rank calls `prepare(rank)` before its program, and
    may change its environment there.
    """

    def __init__(
        self,
        directory: Path,
        argv: list[str],
        world: int,
        environment: Mapping[str, str] = os.environ,
        *,
        local: int | None = None,
        prepare: Callable[[int], object] = lambda rank: None,
    ) -> None:
        directory.mkdir(parents=True)
        self._directory, port = directory, str(free_port())

        def run(rank: int) -> None:
            kept = dict(environment)
            os.environ.clear()
            os.environ.update(
                kept,
                RANK=str(rank),
                LOCAL_RANK=str(rank % (local or world)),
                WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(local or world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            sys.argv = ["pretrain_gpt.py", *argv]
            prepare(rank)
            pretrain_gpt.main()

        self._ranks = [
            fork(partial(run, rank), directory / f"{rank}.out", directory / f"{rank}.err")
            for rank in range(world)
        ]

    @property
    def statuses(self) -> dict[int, int]:
        """Of ranks that have ended; a signal's number is negative."""
        codes = {rank: process.exitcode for rank, process in enumerate(self._ranks)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def log(self, rank: int) -> str:
        """What a rank has printed, stdout and then stderr."""
        files = [self._directory / f"{rank}.{kind}" for kind in ("out", "err")]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def stderr(self, rank: int) -> str:
        """What a rank has written to stderr."""
        file = self._directory / f"{rank}.err"
        return file.read_text(errors="replace") if file.exists() else ""

    def send(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank, unless it has ended."""
        process = self._ranks[rank]
        if process.pid and process.is_alive():
            os.kill(process.pid, number)

    def poll(self) -> bool:
        """Whether all ranks have ended."""
        return len(self.statuses) == len(self._ranks)

    def wait(self, seconds: float) -> bool:
        """Wait until all ranks have ended; False if they do not in time."""
        deadline = time.monotonic() + seconds
        while not self.poll():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Ends what is left."""
        for rank in range(len(self._ranks)):
            self.send(rank, signal.SIGKILL)
        self.wait(10)
