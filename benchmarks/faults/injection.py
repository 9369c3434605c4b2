"""Faults at the n-th call that a process makes on the files below a directory (calls.c is preloaded)."""

import ctypes
import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KILL, PART, SLOW, CLOCK = 0, -1, -2, -3  # as in calls.c; an errno is positive
FAULTS = (  # of a disk at a call: their names, and what and argument of a Fault
    ("EIO at a call", errno.EIO, 0),
    ("ESTALE at a call", errno.ESTALE, 0),
    ("disk full from a call on", errno.ENOSPC, 1),
    ("quota used up from a call on", errno.EDQUOT, 1),
    ("read-only from a call on", errno.EROFS, 1),
    ("half read or written at a call", PART, 0),
)
_SOURCE = Path(__file__).with_name("calls.c")


@dataclass(frozen=True)
class Fault:
    """What happens at call number `call`; `argument` is explained in calls.c."""

    what: int
    call: int
    argument: int = 0


def preload(directory: Path, argv: list[str]) -> int | None:
    """None if calls.c is preloaded; else runs this program again with it, and returns its status."""
    if "LD_PRELOAD" in os.environ:
        return None
    library = directory / "calls.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    alone = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], env=os.environ | alone, check=False).returncode


class Calls:
    """This process's calls on files below a directory."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.calls.restype = ctypes.c_long

    def arm(self, directory: Path, fault: Fault) -> None:
        """Let `fault` happen; forked processes inherit it."""
        self._library.watch(str(directory).encode())
        self._library.arm(ctypes.c_long(fault.call), fault.what, ctypes.c_long(fault.argument))

    def disarm(self) -> int:
        """Let nothing more happen; returns the number of calls since `arm`."""
        number = self.count()
        self._library.arm(ctypes.c_long(0), 0, ctypes.c_long(0))
        return number

    def count(self) -> int:
        """Return how many there were since `arm`."""
        return self._library.calls()
