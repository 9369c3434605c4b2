"""Says a line once per node where several of its ranks have the same one, and before any of them leaves.

Ranks that have not met yet share only the machine. Each that has something to say locks a file in /dev/shm
and speaks, unless the file says that another one has. A rank that stays silent has held the lock, so the line
is out before the first rank leaves: a launcher then ends the others.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_zpp.distributed.topology import Topology

SHARED_MEMORY = Path("/dev/shm")  # this machine's alone, never slow, and empty after it was started again
_LOCK_SECONDS = 5.0  # longer than any speaker needs; who holds the lock may be stopped
_KEPT_SECONDS = 600.0  # a rank that comes still later says the line again


class OncePerNode:
    """Lines on stderr that the ranks of one node share."""

    def __init__(self, job: str | None, directory: Path = SHARED_MEMORY) -> None:
        """`job` names this job and node, alike on the node's ranks; None for a rank that is alone there."""
        self._job = job
        self._file = directory / f"megatron_zpp-{os.geteuid()}"

    @classmethod
    def of(cls, topology: Topology, environment: Mapping[str, str]) -> "OncePerNode":
        """For the node of `topology`; `environment` says where the ranks of the job meet."""
        if topology.local_world_size == 1:
            return cls(None)
        address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
        return cls(f"{address}:{port} node {topology.node_of(topology.rank)}")

    def about(self, topic: str) -> Callable[[str, str], None]:
        """Says lines that are all on one topic, whatever their message is."""
        return lambda message, line: self.say(topic, line)

    def say(self, topic: str, line: str) -> None:
        """Writes `line` to stderr, unless a rank of this start of the job has said one on `topic`.

        Returns when one of them is out. Where the ranks cannot find that out, each says its line.
        """
        if self._job is None:
            write_line(line)
            return
        said = False
        try:
            with _locked(self._file) as descriptor:
                started, now = _started(), time.clock_gettime(time.CLOCK_BOOTTIME)
                key = hashlib.blake2b(f"{self._job} {topic}".encode(), digest_size=16).hexdigest()
                claims = [claim for claim in _claims(descriptor) if 0 <= now - claim[0] <= _KEPT_SECONDS]
                # What was said before this process began was said by another start of the job.
                if any(of == key and started <= when for when, of in claims):
                    return
                write_line(line)
                said = True  # before it is claimed: a speaker that is killed here silences nobody
                text = "".join(f"{when!r} {of}\n" for when, of in [*claims, (now, key)])
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, text.encode(), 0)
        except OSError:
            if not said:
                write_line(line)


def write_line(line: str) -> None:
    """Writes to stderr from any thread: sys.stderr may be locked by one that is stuck."""
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"{line}\n".encode())


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """The descriptor of `file`, locked. Raises OSError where others can write to it, or hold it too long."""
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
    """When something was said, in seconds since the machine was started, and the key of what it was."""
    claims = []
    for line in os.pread(descriptor, 2**20, 0).decode(errors="replace").splitlines():
        when, _, key = line.partition(" ")
        with suppress(ValueError):  # a line that was cut short
            claims.append((float(when), key))
    return claims


def _started() -> float:
    """When this process was, in seconds since the machine was. Raises OSError where that is not known."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # proc(5): starttime
    if ticks == 0:
        raise OSError("/proc/self/stat has no starttime")
    return ticks / os.sysconf("SC_CLK_TCK")
