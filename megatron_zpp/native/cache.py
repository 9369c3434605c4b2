"""The directory of built libraries: private to this user, one builder at a time.

What is in it runs as code. So nobody else may be able to change it: neither the directory nor any directory
above it, by which it could be swapped. Directories are made with mode 0700 and files with 0600, whatever the
umask.
"""

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.1
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
PRIVATE_UMASK = 0o077  # for compilers


class BuildError(OSError):
    """The library could not be built or loaded; the message says what to do about it."""


def cache_directory(environ: Mapping[str, str]) -> Path:
    """MEGATRON_ZPP_CACHE, else megatron_zpp in XDG_CACHE_HOME or ~/.cache; made where it is missing.

    Raises BuildError where it is a symbolic link, which others might redirect, where it belongs to another
    user or others can write to it, and where a directory above it belongs to somebody other than this user
    and root, or can be written by others and is not sticky, as /tmp is.
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
        above = [(place, place.lstat()) for place in reversed(whole.parents)]
    except OSError as error:
        raise BuildError(f"{directory} cannot be made ({error.strerror}); {_ELSEWHERE}") from error
    if stat.S_ISLNK(found.st_mode):
        raise BuildError(f"{directory} is a symbolic link, and code is not loaded through one; {_ELSEWHERE}")
    if not stat.S_ISDIR(found.st_mode):
        raise BuildError(f"{directory} cannot be made (it is a file); {_ELSEWHERE}")
    for place, status in above:
        if status.st_uid not in (0, os.geteuid()):
            raise BuildError(f"{place}, above {directory}, belongs to user {status.st_uid}; {_ELSEWHERE}")
        if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise BuildError(
                f"others can write to {place} and so replace {directory}: chmod go-w {place}, or {_ELSEWHERE}"
            )
    if found.st_uid != os.geteuid():
        raise BuildError(f"{directory} belongs to user {found.st_uid}, not to you; {_ELSEWHERE}")
    if found.st_mode & OTHERS_WRITE:
        raise BuildError(f"others can write to {directory}: chmod 700 it, if they have not yet")
    return whole


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file in the cache, made with mode 0600 where it is missing. Raises BuildError."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fchmod(descriptor, 0o600)  # the umask may have taken what the owner needs
    except OSError as error:
        raise BuildError(f"{path} cannot be written ({error.strerror}); {_ELSEWHERE}") from error
    return descriptor


@contextmanager
def building_directory(cache: Path, name: str) -> Iterator[Path]:
    """A directory in the cache to build `name` in, removed afterwards; a killed builder leaves it."""
    with tempfile.TemporaryDirectory(prefix=f"{name}.building-", dir=cache) as directory:
        os.chmod(directory, 0o700)
        yield Path(directory)


def _make_private(directory: Path) -> None:
    """Makes the directory and those above it that are missing."""
    missing = []
    for place in (directory, *directory.parents):
        if place.exists():
            break
        missing.append(place)
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process is as far
            place.mkdir(mode=0o700)
            place.chmod(0o700)


@contextmanager
def locked(path: Path, say: Callable[[str], None], wait_seconds: float) -> Iterator[None]:
    """Holds the lock file `path`, which then says who holds it.

    The kernel frees the lock when its holder dies, so none is left behind. Where another process holds it,
    says so once, and raises BuildError after `wait_seconds`.
    """
    descriptor = open_private(path, os.O_RDWR)
    try:
        _acquire(descriptor, path, say, wait_seconds)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, say: Callable[[str], None], wait_seconds: float) -> None:
    started, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise BuildError(f"{path} cannot be locked ({error.strerror}); {_ELSEWHERE}") from error
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        if time.monotonic() - started >= wait_seconds:
            raise BuildError(
                f"{holder} has been building the kernels for over {wait_seconds:g} s and holds {path}; "
                f"end it and start again, or set MEGATRON_ZPP_CACHE to another directory"
            )
        if not said:
            say(f"waiting for {holder}, which builds the kernels")
            said = True
        time.sleep(POLL_SECONDS)


_ELSEWHERE = "set MEGATRON_ZPP_CACHE to a directory of your own"
