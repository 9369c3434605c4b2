"""A lease on a directory: a file that says which process uses it, renewed as long as that process lives.

RUNNING.json    {"lease": ID, "host": …, "boot": …, "pid_namespace": …, "process": PID, "process_started": …,
                "since": UTC time, "renewed": COUNT}

It needs no locks of the file system, so it holds on NFS: one process alone can make a file with O_EXCL, and
it rewrites that in place with a greater count. Clocks of hosts are not compared. A holder of this host lives
if its process does. Any other lives if its count grows while one watches.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.regular import read_limited

LEASE = "RUNNING.json"
SECONDS = 30.0  # without a renewal, after which a holder elsewhere counts as dead
_RENEWALS = 6  # in that time
_LIMIT = 4096  # bytes of the file
_SETTLE = 0.5  # seconds after which a lease that was taken over is read again


class Held(OSError):
    """Another live process has the lease; the message names it."""


class LeaseLost(OSError):
    """Another process has taken the lease over; the message names it."""


@dataclass(frozen=True)
class Holder:
    """A process, told so that others can find out whether it lives."""

    lease: str
    host: str
    boot: str  # of the host's kernel: pids of an earlier one mean nothing
    pid_namespace: str
    process: int
    process_started: int  # clock ticks after the boot: a pid may have been given to another process
    since: str
    renewed: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, started {self.since}"

    @classmethod
    def here(cls) -> "Holder":
        """This process."""
        return cls(
            secrets.token_hex(8),
            platform.node(),
            *_kernel(),
            os.getpid(),
            _started(os.getpid()) or 0,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def lives(self) -> bool | None:
        """Whether its process does; None where that cannot be seen from here."""
        if (self.boot, self.pid_namespace) != _kernel() or not self.boot:
            return None
        return _started(self.process) == self.process_started


class Lease:
    """Use it in a `with` block, which gives it back."""

    def __init__(self, directory: Path, say: Callable[[str], None], seconds: float = SECONDS) -> None:
        """Takes the lease of a directory, which is made where it is missing.

        Waits for `seconds`, and says so, to find out whether a holder on another host lives. Raises Held if
        it does; OSError as the file system does.
        """
        self._path, self._seconds, self._holder = directory / LEASE, seconds, Holder.here()
        self._made_directory = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._take(say)
        self._lost: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_over, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self.check()
            self._path.unlink()
            if self._made_directory:
                self._path.parent.rmdir()  # fails, as it should, where something was saved
        os.close(self._descriptor)

    @property
    def lost(self) -> bool:
        """Whether it is known that another process has it; costs nothing."""
        return self._lost is not None

    def check(self) -> None:
        """Reads the file. Raises LeaseLost when another process has the lease."""
        with contextlib.suppress(OSError):  # what cannot be read now was not taken over, as far as is known
            other = _parse(self._content())
            if other is not None and other.lease != self._holder.lease:
                self._lost = f"{self._path} was taken over by {other}"
        if self._lost is not None:
            raise LeaseLost(self._lost)

    def _take(self, say: Callable[[str], None]) -> int:
        """Returns a descriptor of the file, which is ours then."""
        while True:
            with contextlib.suppress(FileExistsError):
                return self._create(self._path)
            content = self._content()
            self._await_death(content, say)
            if content is None or self._content() != content:
                continue  # it was given back, or taken over by a third process
            descriptor = self._create(partial := self._path.with_name(f"{LEASE}.{self._holder.lease}"))
            os.replace(partial, self._path)
            time.sleep(_SETTLE)  # of two that take it over at once the later one has it
            other = _parse(self._content())
            if other is not None and other.lease == self._holder.lease:
                return descriptor
            os.close(descriptor)

    def _await_death(self, content: bytes | None, say: Callable[[str], None]) -> None:
        """Returns when whoever wrote `content` is dead, as far as can be known. Raises Held."""
        holder = _parse(content)
        lives = holder.lives() if holder is not None else None
        if lives:
            raise Held(str(holder))
        if lives is False:
            return
        who = "a process that did not get to write its name" if holder is None else str(holder)
        say(f"{self._path} is of {who}; waiting {self._seconds:g} s to see whether that still runs")
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._seconds / 10))
            if (now := self._content()) != content:
                if (alive := _parse(now)) is not None:
                    raise Held(str(alive))
                return

    def _create(self, path: Path) -> int:
        """Makes the file, which no other process can do then; a descriptor to rewrite it by."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._write(descriptor)
            fsync(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._seconds / _RENEWALS):
            self._holder = replace(self._holder, renewed=self._holder.renewed + 1)
            with contextlib.suppress(OSError):  # the next time, perhaps
                try:
                    self.check()
                except LeaseLost:
                    return
                # By descriptor: where another process has put its file since, this writes to ours.
                self._write(self._descriptor)

    def _write(self, descriptor: int) -> None:
        fields: dict[str, Any] = asdict(self._holder)
        fields["renewed"] = f"{self._holder.renewed:010d}"  # the file is rewritten in place, so of one length
        os.pwrite(descriptor, (json.dumps(fields) + "\n").encode(), 0)
        os.fsync(descriptor)  # other clients of a network file system see it

    def _content(self) -> bytes | None:
        try:
            return read_limited(self._path, _LIMIT)
        except FileNotFoundError:
            return None


def _parse(content: bytes | None) -> Holder | None:
    """The holder that a lease names; None for one that is missing, or was cut off as it was made."""
    try:
        fields = json.loads(content or b"null")
        holder = Holder(**{**fields, "renewed": int(fields["renewed"])})
        return holder if isinstance(holder.process, int) else None
    except (ValueError, TypeError, KeyError):
        return None


def _kernel() -> tuple[str, str]:
    """What tells this boot of this host, and these process numbers, from all others; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(process: int) -> int | None:
    """When a process of this host was started; None when it is gone, or a zombie that nobody has buried."""
    try:
        # proc(5): the name, in parentheses, may hold anything; state is field 3, starttime field 22.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
