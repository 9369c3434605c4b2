"""Runs programs in forks of one process that has already imported them.

A fork has an exit status, streams, an environment and a memory of its own, as a program has that a person
starts, but costs milliseconds where importing torch costs seconds. `Programs` is a test's side; `serve` runs
in the process that forks, which must have no threads.

A line of JSON asks: {"ranks": [{"argv": […], "env": {…}}, …], "cwd": …, "timeout": …}; one answers: a list of
what each rank did.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT, environment

_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True)
class Done:
    """How a program ended; `status` is None when it did not in time and was killed.

    `seconds` passed, and `processor` seconds were computed by it and those children that it waited for.
    """

    status: int | None
    stdout: str
    stderr: str
    seconds: float
    processor: float


class Programs:
    """Starts programs of this repository, named by their path below its root. Use it in a `with` block."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=120)
        self._server.stdout.close()

    def run(self, *argv: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 120) -> Done:
        """One program to its end."""
        (done,) = self.run_ranks([(argv, env or {})], cwd, timeout)
        return done

    def run_ranks(
        self, ranks: Sequence[tuple[Sequence[str], dict[str, str]]], cwd: Path, timeout: float
    ) -> list[Done]:
        """Several at once, each with what joins its environment."""
        request = {
            "ranks": [{"argv": list(argv), "env": {**environment(), **env}} for argv, env in ranks],
            "cwd": str(cwd),
            "timeout": timeout,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return [Done(**done) for done in json.loads(self._server.stdout.readline())]


def serve() -> None:
    """Answers requests on stdin until it is closed."""
    import tests.preloaded  # noqa: F401 - once, for all programs

    for line in sys.stdin:
        request = json.loads(line)
        answer = json.dumps(_run_ranks(request["ranks"], request["cwd"], request["timeout"]))
        print(answer, flush=True)


def _run_ranks(ranks: list[dict[str, Any]], cwd: str, timeout: float) -> list[dict[str, Any]]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as outputs:
        go, wait = os.pipe()[::-1]  # a rank that ends before another has started would not be of its job
        running = [
            _fork(rank["argv"], rank["env"], cwd, f"{outputs}/{n}", (go, wait))
            for n, rank in enumerate(ranks)
        ]
        os.close(wait)
        os.close(go)
        pids = dict(enumerate(running))
        ended: dict[int, tuple[int | None, float, float]] = {}
        while pids:
            late = time.monotonic() > started + timeout
            for number, pid in list(pids.items()):
                found, status, used = os.wait4(pid, os.WNOHANG)
                if found or late:
                    code = os.waitstatus_to_exitcode(status) if found else None
                    ended[number] = (code, time.monotonic() - started, used.ru_utime + used.ru_stime)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # with the workers it may have left
                    if not found:
                        os.waitpid(pid, 0)
                    del pids[number]
            time.sleep(0.002)
        return [
            {
                "status": ended[n][0],
                "seconds": ended[n][1],
                "processor": ended[n][2],
                "stdout": Path(f"{outputs}/{n}.out").read_text(errors="replace"),
                "stderr": Path(f"{outputs}/{n}.err").read_text(errors="replace"),
            }
            for n in range(len(ranks))
        ]


def _fork(argv: list[str], env: dict[str, str], cwd: str, output: str, gate: tuple[int, int]) -> int:
    """Start a program, which waits until the writing end of `gate`, the first, is closed everywhere."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does it as well
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        os.close(gate[0])
        os.read(gate[1], 1)
        os.close(gate[1])
        for descriptor, name in ((0, os.devnull), (1, f"{output}.out"), (2, f"{output}.err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        _drop_capabilities()
        status = _run(argv)
    finally:
        os._exit(status)


def _run(argv: list[str]) -> int:
    """The exit status that Python gives a script."""
    sys.argv = list(argv)
    try:
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _drop_capabilities() -> None:
    """Drop root's capabilities, because CI may run as root, for whom permissions have no effect."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    serve()
