"""A run's private directory in the memory of this host, whose files outlive the processes of the run.

PARENT/megatron_zpp-snapshots-UID/RUN/      mode 0700; PARENT is a tmpfs, such as /dev/shm
    lock                                    locked by every live rank: no other run removes the directory then

Nothing removes the directory of a run that is never started again, but the next run of the user on this host,
a day later.
"""

import fcntl
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

_LOCK = "lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = ("tmpfs", "ramfs")
_ABANDONED = 24 * 3600.0  # seconds without a change, after which an unlocked directory is removed


def snapshots_root(parent: str) -> Path:
    """The directory of all runs of this user, which may not exist.

    Raises ValueError if `parent` is not a directory in memory or `snapshots_root` is not this user's alone.
    """
    root = Path(parent) / f"megatron_zpp-snapshots-{os.geteuid()}"
    try:
        kind = kind_of_file_system(parent)
    except OSError as error:
        raise ValueError(f"{error.strerror}; name a directory in memory, such as /dev/shm") from None
    if kind not in _KINDS:
        raise ValueError(f"is on {kind or 'an unknown file system'}; must be in memory, on tmpfs")
    try:
        _check_private(root)
    except OSError as error:
        raise ValueError(str(error)) from None
    return root


def run_directory(root: Path, run: str) -> Path:
    """The directory of a run, which may not exist. Raises OSError if it or `root` is not yours alone."""
    _check_private(root)
    _check_private(root / run)
    return root / run


def _check_private(directory: Path) -> None:
    """Raise OSError unless a directory is missing, or this user's alone."""
    with suppress(FileNotFoundError):
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{directory} is not a directory of yours alone (mode 0700); remove it")


def room_for(root: Path, run: str | None) -> int:
    """The bytes that the directory of `run` may grow to, in the file system and in the host's memory."""
    parent = os.statvfs(root.parent)
    free = min(parent.f_bavail * parent.f_frsize, available_memory())
    return free + size_of(root, run)


class RunMemory:
    """The directory of a run while this process uses it."""

    def __init__(self, root: Path, run: str) -> None:
        """Create the directory, or take the one that an earlier start left. Raises OSError."""
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        self.path = run_directory(root, run)  # from now on nobody else can make anything below `root`
        _remove_abandoned(root, run)
        self._descriptor = _lock(self.path)

    def close(self) -> None:
        """Release the directory; it stays."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _lock(directory: Path) -> int:
    """The descriptor of the lock of a directory, which exists and stays until the descriptor is closed."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another run has just removed it
            descriptor = os.open(directory / _LOCK, _LOCK_FLAGS, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(descriptor), os.stat(directory / _LOCK)):
                return descriptor
            os.close(descriptor)


def _remove_abandoned(root: Path, run: str) -> None:
    for directory in root.iterdir():
        if directory.name == run:
            continue
        with suppress(OSError):  # it is in use, or another rank has just removed it
            # Without a lock, a process that was killed in between left it.
            descriptor = os.open(directory / _LOCK, _LOCK_FLAGS, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                changed = max(path.lstat().st_mtime for path in (directory, *directory.rglob("*")))
                if time.time() - changed > _ABANDONED:
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def kind_of_file_system(directory: str) -> str | None:
    """The kind of the file system of a directory, from the kernel's list of mounts; None if not listed."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():  # proc(5)
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return None


def available_memory() -> int:
    """Bytes that processes can still use without swapping, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    raise OSError("/proc/meminfo has no MemAvailable")


def size_of(root: Path, run: str | None) -> int:
    """Bytes of the files of a run, if it has some; a file with several names counts once."""
    sizes: dict[int, int] = {}
    for path in (root / run).rglob("*") if run else ():
        with suppress(OSError):
            found = path.lstat()
            sizes[found.st_ino] = 512 * found.st_blocks
    return sum(sizes.values())
