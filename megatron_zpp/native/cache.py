"""The directory of built libraries: private to this user, with one builder of each library at a time.

Its files run as code, so no other user may be able to change the directory, nor a directory above it, which
would allow replacing it.
"""

import fcntl
import math
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_zpp.storage.files import fsync

POLL_SECONDS = 0.1  # until the second look of a process that waits
EVERY_SECONDS = 10.0  # between two lines of progress
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BuildError(OSError):
    """A library could not be built or loaded; the message says what to do."""


def cache_directory(environ: Mapping[str, str]) -> Path:
    """MEGATRON_ZPP_CACHE, by default megatron_zpp in XDG_CACHE_HOME or ~/.cache; created if it is missing.

    Raises BuildError if the directory is a symbolic link, which others might redirect, belongs to another
    user or is writable by others, or if a directory above it belongs to a user other than this one and root,
    or is writable by others without being sticky, as /tmp is.
    """
    if environ.get("MEGATRON_ZPP_CACHE"):
        directory = Path(environ["MEGATRON_ZPP_CACHE"]).absolute()
    else:
        home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
        directory = (Path(home) / "megatron_zpp").absolute()
    try:
        for path in reversed([path for path in directory.parents if not path.exists()]):
            path.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
        whole = directory.resolve()
        above = [(parent, parent.lstat()) for parent in reversed(whole.parents)]
    except OSError as error:
        raise BuildError(f"{directory} cannot be created ({error.strerror}); {_ELSEWHERE}") from error
    if stat.S_ISLNK(found.st_mode):
        raise BuildError(f"{directory} is a symbolic link, and code is not loaded through one; {_ELSEWHERE}")
    for parent, status in above:
        if status.st_uid not in (0, os.geteuid()):
            raise BuildError(f"{parent}, above {directory}, belongs to user {status.st_uid}; {_ELSEWHERE}")
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            fix = f"chmod go-w {parent}, or {_ELSEWHERE}"
            raise BuildError(f"others can write to {parent} and so replace {directory}: {fix}")
    if found.st_uid != os.geteuid():
        raise BuildError(f"{directory} belongs to user {found.st_uid}, not to you; {_ELSEWHERE}")
    if found.st_mode & _OTHERS_WRITE:
        raise BuildError(f"others can write to {directory}: chmod 700 it, unless they already have written")
    return whole


def build_once(
    library: Path,
    make: Callable[[Path], object],
    say: Callable[[str], None],
    *,
    wait_seconds: float,
    every_seconds: float = EVERY_SECONDS,
) -> Path:
    """Return `library`, a file of the cache; if it is missing, `make` writes it to a temporary directory.

    One process makes it. The others wait until it is there, or until the kernel has released the lock of a
    process that died: `say` gets a line every `every_seconds`, and BuildError is raised after `wait_seconds`.
    They seldom ask for the lock, which they do not need one after another.
    """
    if library.exists():
        return library
    lock = library.with_suffix(".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BuildError(f"{lock} cannot be written ({error.strerror}); {_ELSEWHERE}") from error
    try:
        if _acquire(descriptor, lock, library, say, wait_seconds, every_seconds) and not library.exists():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            for abandoned in library.parent.glob(f"{library.stem}.building-*"):
                shutil.rmtree(abandoned, ignore_errors=True)  # its builder is dead, because we hold the lock
            prefix = f"{library.stem}.building-"
            with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent) as directory:
                made = Path(directory) / library.name
                make(made)
                fsync(made)  # loading a library whose end is missing would kill the process with SIGBUS
                os.replace(made, library)
                fsync(library.parent)
    finally:
        os.close(descriptor)
    return library


def _acquire(
    descriptor: int,
    path: Path,
    library: Path,
    say: Callable[[str], None],
    wait_seconds: float,
    every_seconds: float,
) -> bool:
    """Return whether the lock was acquired; not if another process has made `library` meanwhile."""
    from megatron_zpp.storage.waits import attempt_wait, growing_waits

    started, said, waits, attempt_at = time.monotonic(), 0, growing_waits(POLL_SECONDS), -math.inf
    while True:
        if time.monotonic() >= attempt_at:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                attempt_at = time.monotonic() + attempt_wait()
            except OSError as error:
                raise BuildError(f"{path} cannot be locked ({error.strerror}); {_ELSEWHERE}") from error
        if library.exists():
            return False
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        waited = time.monotonic() - started
        if waited >= wait_seconds:
            raise BuildError(
                f"{holder} has been building the kernels for over {wait_seconds:g} s and holds {path}; "
                f"end that process and start again, or set MEGATRON_ZPP_CACHE to another directory"
            )
        if waited >= said * every_seconds:
            so_far = f", {waited:.0f} s so far" if said else ""
            say(f"waiting for {holder}, which is building the kernels{so_far}")
            said += 1
        time.sleep(max(0.0, min(next(waits), said * every_seconds - waited, wait_seconds - waited)))


_ELSEWHERE = "set MEGATRON_ZPP_CACHE to a directory of your own"
