"""The directory of built libraries: private to this user, with one builder at a time.

Its files run as code, so no other user may be able to change the directory, nor a directory above it, which
would allow replacing it. Directories are created with mode 0700 and files with 0600, whatever the umask.
"""

import contextlib
import fcntl
import math
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_zpp.native.progress import EVERY_SECONDS
from megatron_zpp.storage.waits import attempt_wait, growing_waits

POLL_SECONDS = 0.1  # until the second look of a process that waits
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
PRIVATE_UMASK = 0o077  # for compilers


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
        _make_private(directory)
        found = directory.lstat()
        whole = directory.resolve()
        above = [(parent, parent.lstat()) for parent in reversed(whole.parents)]
    except OSError as error:
        raise BuildError(f"{directory} cannot be created ({error.strerror}); {_ELSEWHERE}") from error
    if stat.S_ISLNK(found.st_mode):
        raise BuildError(f"{directory} is a symbolic link, and code is not loaded through one; {_ELSEWHERE}")
    if not stat.S_ISDIR(found.st_mode):
        raise BuildError(f"{directory} cannot be created (it is a file); {_ELSEWHERE}")
    for parent, status in above:
        if status.st_uid not in (0, os.geteuid()):
            raise BuildError(f"{parent}, above {directory}, belongs to user {status.st_uid}; {_ELSEWHERE}")
        if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise BuildError(
                f"others can write to {parent} and so replace {directory}: "
                f"chmod go-w {parent}, or {_ELSEWHERE}"
            )
    if found.st_uid != os.geteuid():
        raise BuildError(f"{directory} belongs to user {found.st_uid}, not to you; {_ELSEWHERE}")
    if found.st_mode & OTHERS_WRITE:
        raise BuildError(f"others can write to {directory}: chmod 700 it, unless they already have written")
    return whole


def open_private(path: Path, flags: int) -> int:
    """Open a file in the cache, created with mode 0600 if it is missing. Raises BuildError."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fchmod(descriptor, 0o600)  # the umask may have removed the owner's permissions
    except OSError as error:
        raise BuildError(f"{path} cannot be written ({error.strerror}); {_ELSEWHERE}") from error
    return descriptor


@contextmanager
def building_directory(cache: Path, name: str) -> Iterator[Path]:
    """A temporary directory in the cache to build `name` in; it remains if the builder is killed."""
    with tempfile.TemporaryDirectory(prefix=f"{name}.building-", dir=cache) as directory:
        os.chmod(directory, 0o700)
        yield Path(directory)


def _make_private(directory: Path) -> None:
    """Create the directory and the missing ones above it."""
    missing = []
    for path in (directory, *directory.parents):
        if path.exists():
            break
        missing.append(path)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process created it
            path.mkdir(mode=0o700)
            path.chmod(0o700)


@contextmanager
def locked(
    path: Path,
    say: Callable[[str], None],
    wait_seconds: float,
    every_seconds: float = EVERY_SECONDS,
    is_built: Callable[[], bool] | None = None,
) -> Iterator[bool]:
    """Hold the lock on file `path`, and write to the file which process holds it.

    The kernel releases the lock when its holder dies. If another process holds it, `say` gets a line every
    `every_seconds`, and BuildError is raised after `wait_seconds`. Yields whether the lock is held: not if
    `is_built` says during the wait that the other process has done the work. So the processes that wait do
    not need the lock one after another, and seldom ask for it.
    """
    descriptor = open_private(path, os.O_RDWR)
    try:
        held = _acquire(descriptor, path, say, wait_seconds, every_seconds, is_built)
        if held:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield held
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int,
    path: Path,
    say: Callable[[str], None],
    wait_seconds: float,
    every_seconds: float,
    is_built: Callable[[], bool] | None,
) -> bool:
    started, said, waits, attempt_at = time.monotonic(), 0, growing_waits(POLL_SECONDS), -math.inf
    while True:
        if time.monotonic() >= attempt_at:
            if _lock(descriptor, path):
                return True
            if is_built is not None:
                attempt_at = time.monotonic() + attempt_wait()
        if is_built is not None and is_built():
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


def _lock(descriptor: int, path: Path) -> bool:
    """Return whether the lock was free, and is held now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise BuildError(f"{path} cannot be locked ({error.strerror}); {_ELSEWHERE}") from error
    return True


_ELSEWHERE = "set MEGATRON_ZPP_CACHE to a directory of your own"
