"""A lease on a directory: a file that names the process using it, renewed for as long as that process lives.

RUNNING.json    {"lease": ID, "host": …, "boot": …, "pid_namespace": …, "process": PID, "process_started": …,
                "since": UTC time, "renewed": COUNT, "crc32": of the JSON text of the other fields}

The lease works on NFS, because it needs no file locks: only one process can create a file with O_EXCL, and
that process rewrites the file in place with an increasing count. In an object store, it works by conditional
requests, which the store refuses if the object is not the one that this process has read or written last.
Clocks of different hosts are never compared. A holder on this host is alive if its process is; a holder on
another host is alive if its count increases.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.object_errors import Conflict
from megatron_zpp.storage.regular import read_limited

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.lease_record import ObjectRecord

LEASE = "RUNNING.json"
SECONDS = 30.0  # without a renewal, after which a holder on another host counts as dead
_RENEWALS = 6  # within SECONDS
_LIMIT = 4096  # bytes of the record
_SETTLE = 0.5  # seconds between taking over a file and reading it again


class Held(OSError):
    """Another live process holds the lease; the message names it."""


class LeaseLost(OSError):
    """Another process has taken over the lease, or the file is gone; the message says which."""


@dataclass(frozen=True)
class Holder:
    """A process, described such that others can find out whether it is alive."""

    lease: str
    host: str
    boot: str  # id of the kernel's boot: process ids of an earlier boot mean nothing
    pid_namespace: str
    process: int
    process_started: int  # clock ticks after the boot: process ids are reused
    since: str
    renewed: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, started {self.since}"

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Return the description of this process, with a new lease id."""
        return cls(
            secrets.token_hex(8),
            platform.node(),
            *_kernel(),
            os.getpid(),
            _started(os.getpid()) or 0,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; None if this process cannot see it."""
        if (self.boot, self.pid_namespace) != _kernel() or not self.boot:
            return None
        return _started(self.process) == self.process_started

    def encode(self) -> bytes:
        """Return the content of a lease; its length stays the same, because a file is rewritten in place."""
        fields = {**asdict(self), "renewed": f"{self.renewed:010d}"}
        return (json.dumps({**fields, "crc32": f"{_crc32(fields):010d}"}) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes | None) -> "Holder | None":
        """Return the holder that a lease names; None if the lease is missing, incomplete or damaged."""
        try:
            fields = json.loads(content or b"null")
            if int(fields.pop("crc32")) != _crc32(fields):
                return None
            return cls(**{**fields, "renewed": int(fields["renewed"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class FileRecord:
    """A record in a file. All methods raise OSError, also if another process has written it meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made_directory = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = None

    def read(self) -> bytes | None:
        """Return the content; None if there is none."""
        try:
            return read_limited(self._path, _LIMIT)
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> None:
        """Write a record where there is none. Raises FileExistsError, or Conflict, if there is one."""
        self._create(self._path, content)

    def take_over(self, content: bytes, name: str) -> None:
        """Replace the record that was read last. `name` is unique to this process.

        The caller must read the record afterwards: another process may have done the same.
        """
        self._create(partial := self._path.with_name(f"{self._path.name}.{name}"), content)
        os.replace(partial, self._path)
        time.sleep(_SETTLE)  # if two processes take it over at once, the later one holds it

    def renew(self, content: bytes) -> None:
        """Replace the record that this process has written, by one of the same length.

        By descriptor, so that a file that replaced it meanwhile is not overwritten.
        """
        assert self._descriptor is not None
        _rewrite(self._descriptor, content)

    def remove(self) -> None:
        """Remove the record, and the directory if it was made for it and is empty."""
        self._path.unlink()
        if self._made_directory:
            with contextlib.suppress(OSError):  # the directory is not empty
                self._path.parent.rmdir()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # network file systems report errors here; all is on disk
                os.close(descriptor)

    def _create(self, path: Path, content: bytes) -> None:
        """Create the file, which only one process can do, and keep a descriptor for rewriting it."""
        self.close()  # of a file that another process has taken over
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _rewrite(descriptor, content)
            fsync(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor


Record: TypeAlias = Union[FileRecord, "ObjectRecord"]


def record_of(path: Location) -> Record:
    """Return the record at `path`. Raises OSError if it cannot be written there."""
    if isinstance(path, Path):
        return FileRecord(path)
    from megatron_zpp.storage.objects.lease_record import ObjectRecord

    return ObjectRecord(path)


def _rewrite(descriptor: int, content: bytes) -> None:
    os.pwrite(descriptor, content, 0)
    os.fsync(descriptor)  # so that other clients of a network file system see it


class Lease:
    """A held lease, to be used in a `with` block, which returns it at the end."""

    def __init__(self, directory: Location, say: Callable[[str], None], seconds: float = SECONDS) -> None:
        """Take the lease of a directory; the directory is created if it is missing.

        If a process on another host holds it, wait for `seconds`, after a message to `say`, to find out
        whether that process is alive. Raises Held if the holder is alive; OSError from the file system.
        """
        self._path, self._seconds, self._holder = directory / LEASE, seconds, Holder.of_this_process()
        self._record = record_of(self._path)
        self._using = threading.RLock()  # reading and renewing are one operation
        try:
            self._take(say)
        except BaseException:
            self._record.close()
            raise
        self._lost: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_over, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        returning = threading.Thread(target=self._return, name="return of the lease", daemon=True)
        returning.start()
        returning.join(SECONDS)  # storage that does not answer must not keep a process from its end

    def _return(self) -> None:
        self._thread.join()
        with contextlib.suppress(OSError):
            self.check()
            self._record.remove()
        self._record.close()

    @property
    def lost(self) -> bool:
        """Whether a `check` or renewal has found that the lease is lost; reads no file."""
        return self._lost is not None

    def check(self) -> None:
        """Read the file. Raises LeaseLost if another process holds the lease, or has held it and ended."""
        with contextlib.suppress(OSError), self._using:  # if unreadable, there is no proof of another holder
            content = self._record.read()
            other = Holder.decode(content)
            if content is None:
                self._lost = f"{self._path} was removed; another run may have used the directory since"
            elif other is not None and other.lease != self._holder.lease:
                self._lost = f"{self._path} was taken over by {other}"
        if self._lost is not None:
            raise LeaseLost(self._lost)

    def _take(self, say: Callable[[str], None]) -> None:
        while True:
            with contextlib.suppress(FileExistsError, Conflict):
                self._record.create(self._holder.encode())
                return
            content = self._record.read()
            if self._is_ours(content):  # written by a request whose answer was lost
                return
            self._await_death(content, say)
            if content is None or self._record.read() != content:
                continue  # it was returned, or taken over by a third process
            self._record.take_over(self._holder.encode(), self._holder.lease)
            if self._is_ours(self._record.read()):
                return

    def _is_ours(self, content: bytes | None) -> bool:
        holder = Holder.decode(content)
        return holder is not None and holder.lease == self._holder.lease

    def _await_death(self, content: bytes | None, say: Callable[[str], None]) -> None:
        """Return once the process that wrote `content` is dead or no longer renews it. Raises Held."""
        holder = Holder.decode(content)
        is_alive = holder.is_alive() if holder is not None else None
        if is_alive:
            raise Held(str(holder))
        if is_alive is False:
            return
        who = "a process that has not written its name" if holder is None else str(holder)
        say(f"{self._path} is held by {who}; waiting {self._seconds:g} s to see whether it is alive")
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._seconds / 10))
            if (now := self._record.read()) != content:
                if (alive := Holder.decode(now)) is not None:
                    raise Held(str(alive))
                return

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._seconds / _RENEWALS):
            self._holder = replace(self._holder, renewed=self._holder.renewed + 1)
            with contextlib.suppress(OSError), self._using:  # the next renewal may succeed
                try:
                    self.check()
                except LeaseLost:
                    return
                self._record.renew(self._holder.encode())


def _crc32(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields).encode())


def _kernel() -> tuple[str, str]:
    """Return (boot id, pid namespace), which identify the process ids of this host; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(process: int) -> int | None:
    """Return the start time of a process of this host in clock ticks; None if it is gone or a zombie."""
    try:
        # proc(5): the name, in parentheses, may hold any character; state is field 3, starttime field 22.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
