"""Runs programs as a shell would, in forks of the process that has imported them (tests/forkserver.py).

A fork has an exit status, streams, an environment and a memory of its own, as a program has that a person
starts, but costs milliseconds where importing torch costs seconds.
"""

import contextlib
import ctypes
import multiprocessing.synchronize
import os
import resource
import runpy
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forkserver import CONTEXT
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


def run_program(*argv: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 120) -> Done:
    """A program of this repository, named by its path below the root, to its end."""
    (done,) = run_ranks([(argv, env or {})], cwd, timeout)
    return done


def run_ranks(ranks: Sequence[tuple[Sequence[str], dict[str, str]]], cwd: Path, timeout: float) -> list[Done]:
    """Several at once, each with what joins its environment."""
    began, together = time.monotonic(), CONTEXT.Barrier(len(ranks))
    with tempfile.TemporaryDirectory() as outputs:
        places = [Path(outputs) / str(number) for number in range(len(ranks))]
        running = [
            CONTEXT.Process(target=_run, args=(list(argv), {**environment(), **env}, cwd, place, together))
            for (argv, env), place in zip(ranks, places, strict=True)
        ]
        for process in running:
            process.start()
        found = []
        for process, place in zip(running, places, strict=True):
            process.join(max(0.0, began + timeout - time.monotonic()))
            status, seconds = process.exitcode, time.monotonic() - began
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the workers it may have left
            process.join()
            said = [place.with_suffix(kind).read_text(errors="replace") for kind in (".out", ".err")]
            used = place.with_suffix(".used")  # is missing if a signal ended it
            found.append(Done(status, *said, seconds, float(used.read_text()) if used.exists() else seconds))
        return found


def _run(
    argv: list[str],
    env: dict[str, str],
    cwd: Path,
    output: Path,
    together: multiprocessing.synchronize.Barrier,
) -> None:
    """The process of a program; it begins when those of all ranks are there."""
    os.setpgid(0, 0)
    for descriptor, name in ((0, os.devnull), (1, f"{output}.out"), (2, f"{output}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
    together.wait()  # one that ends before another has started would not be of its job
    leave, status = os._exit, 1

    def leave_counted(status: int) -> None:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        Path(f"{output}.used").write_text(str(sum(each.ru_utime + each.ru_stime for each in used)))
        leave(status)

    os._exit = leave_counted
    try:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        multiprocessing.set_start_method(None, force=True)  # or workers would come from a server of their own
        _drop_capabilities()
        status = _status_of(argv)
    finally:
        os._exit(status)


def _status_of(argv: list[str]) -> int:
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
