"""Starts ranks of pretrain_gpt.py by forking from a process that has imported everything: in milliseconds.

The ranks are processes like any others: own pid, own gloo connections, own exit status. What starts them must
have no threads and no process group.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import free_port


def fork(run: Callable[[], None], output: Path) -> int:
    """The pid of a child that runs `run`, its stdout and stderr in a file; a SystemExit is its status."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        run()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Job:
    """The ranks of one run of pretrain_gpt.py. `prepare` is called in each rank first."""

    def __init__(
        self, directory: Path, argv: list[str], world: int, prepare: Callable[[int], None] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, port = directory, str(free_port())
        self.statuses: dict[int, int] = {}  # of ranks that have ended; a signal's number is negative
        self.pids = []

        def run(rank: int) -> None:
            import pretrain_gpt

            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            sys.argv = ["pretrain_gpt.py", *argv]
            if prepare is not None:
                prepare(rank)
            pretrain_gpt.main()

        for rank in range(world):
            self.pids.append(fork(lambda rank=rank: run(rank), directory / f"{rank}.log"))

    def log(self, rank: int) -> str:
        """What a rank has printed, stdout and stderr."""
        path = self._directory / f"{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

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
        """Waits until all ranks have ended; False when they have not in time."""
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
