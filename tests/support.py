"""Starts the programs of this repository the way a user would."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**extra: str) -> dict[str, str]:
    """This environment, with the repository importable, few threads and no launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CI")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **extra}


def run(*argv: str | Path, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs python with `argv` from the repository's root; `extra` joins the environment."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def pretrain(
    *argv: str, processes: int = 1, timeout: float = 120, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs ranks of pretrain_gpt.py, forked from a server that has imported it; what they print, joined."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "ranks"
        request = {"argv": list(map(str, argv)), "world": processes, "environment": environment(**extra)}
        server = _server()
        server.stdin.write(json.dumps(request | {"directory": str(directory), "seconds": timeout}) + "\n")
        server.stdin.flush()
        statuses = json.loads(server.stdout.readline())
        out, err = (
            "".join(sorted_file.read_text() for sorted_file in sorted(directory.glob(f"*.{kind}")))
            for kind in ("out", "err")
        )
    if statuses is None:
        raise subprocess.TimeoutExpired(list(argv), timeout, out, err)
    status = next((status for status in statuses if status), 0)
    return subprocess.CompletedProcess(list(argv), status, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    """Ends when this process does, as its stdin then ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.children"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Returns as soon as `condition` holds; fails when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not after {seconds} s"
        time.sleep(0.01)


class Ranks:
    """The ranks of one run, without a launcher that would end them. Use it in a `with` block."""

    def __init__(self, directory: Path, *argv: str, world: int = 2) -> None:
        directory.mkdir(parents=True)
        self._directory, port = directory, str(free_port())
        self.processes = []
        for rank in map(str, range(world)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            size = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            with open(directory / f"{rank}.out", "w") as out, open(directory / f"{rank}.err", "w") as err:
                process = subprocess.Popen(
                    [sys.executable, *argv],
                    cwd=ROOT,
                    env=environment(**place, **size),
                    stdout=out,
                    stderr=err,
                )
            self.processes.append(process)

    def out(self, rank: int) -> str:
        """What a rank has printed."""
        return (self._directory / f"{rank}.out").read_text()

    def err(self, rank: int) -> str:
        """What a rank has complained of."""
        return (self._directory / f"{rank}.err").read_text()

    def wait_for(self, text: str) -> None:
        """Returns when rank 0 has printed `text`."""
        wait_until(lambda: text in self.out(0) or self.processes[0].poll() is not None)
        assert text in self.out(0), self.err(0)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank."""
        self.processes[rank].send_signal(number)

    def statuses(self) -> list[int]:
        """The exit status of each rank, when all have ended."""
        return [process.wait(timeout=60) for process in self.processes]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
