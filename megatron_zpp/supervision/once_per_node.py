"""Writes a line once per node if several ranks have the same line, before any of these ranks exits.

Ranks that have not connected yet share only the machine. A rank with a line locks a file in /dev/shm and
writes the line unless the file says that another rank has. A rank that does not write has held the lock too,
so the line is out before the first rank exits, after which a launcher may end the others.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from megatron_zpp.config.command_line import message_line
from megatron_zpp.distributed.topology import Topology

SHARED_MEMORY = Path("/dev/shm")  # local to this machine, fast, and empty after a reboot
_LOCK_SECONDS = 5.0  # longer than any rank needs; the holder of the lock may be stopped
_KEPT_SECONDS = 600.0  # a rank that comes later writes the line again


Say = Callable[[str, str], None]  # takes a topic, which ranks may share, and this rank's line on it


def say_here(topic: str, line: str) -> None:
    write_line(line)


def once_per_node(topology: Topology, environment: Mapping[str, str]) -> Say:
    """What writes lines of the node of `topology`; `environment` has the rendezvous address of the job."""
    if topology.local_world_size == 1:
        return say_here
    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    return partial(say_once, f"{address}:{port} node {topology.mesh().node_of(topology.rank)}")


def say_once(job: str, topic: str, line: str, *, directory: Path = SHARED_MEMORY) -> None:
    """Write `line` to stderr, unless a rank of this start of the job has written one on `topic`.

    `job` names this job and node, equally on all ranks of the node. Returns after one of the lines is out. If
    the ranks cannot find that out, each writes its line.
    """
    said = False
    try:
        with _locked(directory / f"megatron_zpp-{os.geteuid()}") as descriptor:
            started, now = process_started(), time.clock_gettime(time.CLOCK_BOOTTIME)
            key = hashlib.blake2b(f"{job} {topic}".encode(), digest_size=16).hexdigest()
            claims = [claim for claim in _claims(descriptor) if 0 <= now - claim[0] <= _KEPT_SECONDS]
            # Lines from before this process started belong to another start of the job.
            if any(of == key and started <= when for when, of in claims):
                return
            write_line(line)
            said = True  # before the claim, so that a rank killed here silences no other
            text = "".join(f"{when!r} {of}\n" for when, of in [*claims, (now, key)])
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
    except OSError:
        if not said:
            write_line(line)


def process_started() -> float:
    """When this process started, before it imported anything, on CLOCK_BOOTTIME in seconds.

    Raises OSError if that is unknown.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # proc(5): starttime
    if ticks == 0:
        raise OSError("/proc/self/stat has no starttime")
    return ticks / os.sysconf("SC_CLK_TCK")


def write_line(line: str) -> None:
    """Write to stderr from any thread: a thread that hangs may hold the lock of sys.stderr.

    On a terminal the line has colours.
    """
    with suppress(OSError):  # the reader is gone
        os.write(2, f"{message_line(line, os.isatty(2))}\n".encode())


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """The descriptor of `file`, locked. Raises OSError if others can write to it or hold it too long."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{file} is not a private file of this user")
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield descriptor
    finally:
        os.close(descriptor)


def _claims(descriptor: int) -> list[tuple[float, str]]:
    """Time of each line written, in seconds since boot, and the key of its topic."""
    claims = []
    for line in os.pread(descriptor, 2**20, 0).decode(errors="replace").splitlines():
        when, _, key = line.partition(" ")
        with suppress(ValueError):  # a line that was cut short
            claims.append((float(when), key))
    return claims
