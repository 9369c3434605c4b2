"""Starts ranks of pretrain_gpt.py by forking from a process that has imported everything: in milliseconds.

The ranks are processes like any others: own pid, own gloo connections, own exit status. What starts them must
have no threads and no process group.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import sentencepiece  # noqa: F401 - what runs import where they use it
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401 - torch itself does at the first step

import megatron_zpp.commands.pretrain  # noqa: F401 - what the ranks run
import pretrain_gpt
from tests.support import free_port

gc.freeze()  # a fork then need not copy what its collector would only look at


class Output(NamedTuple):
    """Files that a child writes its stdout and stderr to; they may be the same."""

    out: Path
    err: Path


def fork(run: Callable[[], None], output: Output) -> int:
    """The pid of a child that runs `run`; a SystemExit is its status."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in ((1, output.out), (2, output.err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        run()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if what reads stdout has ended
            os._exit(status)


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
        self.statuses: dict[int, int] = {}  # of ranks that have ended; a signal's number is negative
        self.pids = []

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

        for rank in range(world):
            files = Output(directory / f"{rank}.out", directory / f"{rank}.err")
            self.pids.append(fork(partial(run, rank), files))

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
        if rank not in self.statuses:
            os.kill(self.pids[rank], number)

    def poll(self) -> bool:
        """Whether all ranks have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) == len(self.pids)

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
        for rank in range(len(self.pids)):
            self.send(rank, signal.SIGKILL)
        self.wait(10)
