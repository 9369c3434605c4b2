"""The directory of built libraries: private to this user, one builder at a time."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.1


class BuildError(OSError):
    """The library could not be built or loaded; the message says what to do about it."""


def cache_directory(environ: Mapping[str, str]) -> Path:
    """MEGATRON_ZPP_CACHE, else megatron_zpp in XDG_CACHE_HOME or ~/.cache; made where it is missing.

    A library in it is code that we run: raises BuildError where others own it or can write to it, or where it
    is a symbolic link, which others might redirect.
    """
    if environ.get("MEGATRON_ZPP_CACHE"):
        directory = Path(environ["MEGATRON_ZPP_CACHE"])
    else:
        home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
        directory = Path(home) / "megatron_zpp"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise BuildError(f"{directory} cannot be made ({error.strerror}); {_ELSEWHERE}") from error
    if stat.S_ISLNK(found.st_mode):
        raise BuildError(f"{directory} is a symbolic link, and code is not loaded through one; {_ELSEWHERE}")
    if found.st_uid != os.geteuid():
        raise BuildError(f"{directory} belongs to user {found.st_uid}, not to you; {_ELSEWHERE}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"others can write to {directory}: chmod 700 it, if they have not yet")
    return directory.resolve()


@contextmanager
def locked(path: Path, say: Callable[[str], None], wait_seconds: float) -> Iterator[None]:
    """Holds the lock file `path`, which then says who holds it.

    The kernel frees the lock when its holder dies, so none is left behind. Where another process holds it,
    says so once, and raises BuildError after `wait_seconds`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
