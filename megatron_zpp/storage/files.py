"""Writes files and directories atomically: a process killed at any time leaves the old or the new state.

An object of an object store is always written this way, and durable once it is written.
"""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_zpp.storage.location import Location, is_object, location
from megatron_zpp.storage.object_errors import ObjectError

_MOST_LINKS = 40  # the kernel's limit
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)  # errors of fsync on a directory on some network file systems


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a directory's entries where supported, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def open_new(path: Path) -> int:
    """Return the descriptor of a new, empty file; what had the name is removed.

    In a directory that others can write to, a link of theirs is removed and not followed. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_shared(path: Path) -> int:
    """Return the descriptor of a file that processes of a group may share. Raises OSError for a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_named(path: Path, flags: int) -> int:
    """Return a descriptor for writing to a file that the user names; it is created if it is missing.

    Links are followed, because the user may have one to another disk, or name /dev/stdout. But in a directory
    that its group or others can write to, a link is followed only if the user or root owns it:
    PermissionError for one of another user, who may have planted it. The kernel has such a rule
    (fs.protected_symlinks), for directories with the sticky bit, and not everywhere. Directories of the path
    may be links of anybody. Raises OSError as the file system does.
    """
    for _ in range(_MOST_LINKS):
        try:
            return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:  # of a link, also of the kernel's rule
            if not path.is_symlink():
                raise
        link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)  # so that nobody replaces it meanwhile
        try:
            status, directory = os.fstat(link), os.stat(path.parent)
            if directory.st_mode & _OTHERS_WRITE and status.st_uid not in (0, os.geteuid()):
                problem = f"is a link of user {status.st_uid} in a directory that others can write to"
                raise PermissionError(errno.EACCES, problem, str(path))
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
        if status.st_dev == os.stat("/proc").st_dev:  # /dev/stdout is a link to one that may lead to a pipe
            return os.open(path, flags | os.O_CLOEXEC)
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


@contextlib.contextmanager
def naming(path: Location | str) -> Iterator[None]:
    """Make an error of the file system that names no file, as one of an open file does, name `path`."""
    try:
        yield
    except OSError as error:
        if error.strerror is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_durably(path: Location, content: bytes) -> None:
    """Write and flush a file. Its name is durable only once its directory is flushed as well."""
    if not isinstance(path, Path):
        path.write(content)
        return
    with naming(path), os.fdopen(open_new(path), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Location, text: str) -> None:
    """Replace the file `path` atomically by one that holds `text`; after an error it is unchanged."""
    write_whole(path, text.encode())


def write_whole(path: Location, content: bytes) -> None:
    """As `write_text`, of bytes."""
    if not isinstance(path, Path):
        path.write(content)
        return
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream for the new content of `path`, which replaces the file atomically when all is on disk.

    A link that has the name is replaced, and not followed.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with naming(path), os.fdopen(open_new(partial), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def keep_first(partial: Path, path: Path) -> None:
    """Give the durable file `partial` the name `path`, unless another process was faster with its own."""
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.replace(partial, path)
        return
    partial.unlink()


def commit_directory(partial: Path, final: Path, retired: Path) -> None:
    """Rename a directory of durable files to its final name, then remove the directory that had the name.

    Between the two renames, the previous directory is complete under the name `retired`.
    """
    fsync(partial)
    if final.exists():
        shutil.rmtree(retired, ignore_errors=True)
        os.replace(final, retired)
    os.replace(partial, final)
    fsync(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def sizes_in(directory: Location, names: Iterable[str]) -> dict[str, int]:
    """Return the bytes of those regular files or objects of a directory that exist, by name."""
    if not isinstance(directory, Path):
        return directory.sizes()
    paths = [directory / name for name in names]
    return {path.name: path.stat().st_size for path in paths if path.is_file()}


def check_replaceable(flag: str, path: str) -> None:
    """Raise ValueError, naming the flag, unless the file `path` can be created or replaced; not for URLs."""
    if "://" in path:
        raise ValueError(f"{flag} {path}: is a URL; give a path of this machine")
    check_writable(flag, str(Path(path).parent))
    for name in (path, f"{path}.partial"):
        try:
            status = os.stat(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ValueError(f"{flag} {name}: {error.strerror}; give another name") from None
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{flag} {name}: is a directory; give another name or remove it")


def _nearest(path: Path) -> Path:
    """Return the path or its closest ancestor that exists."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        if path == path.parent:
            raise  # the working directory was removed
        return _nearest(path.parent)
    return path


def check_writable(flag: str, directory: str) -> None:
    """Raise ValueError, naming the flag, unless files can be created in `directory`.

    If the directory does not exist, its closest ancestor is tested. Leaves no file behind.
    """
    name = f".write-probe-{platform.node()}-{os.getpid()}"
    try:
        probe = (location(directory) if is_object(directory) else _nearest(Path(directory))) / name
        write_durably(probe, b"")
        probe.unlink()
    except ObjectError as error:
        raise ValueError(f"{flag} {directory}: {error.strerror}") from None
    except OSError as error:
        raise ValueError(f"{flag} {directory}: {error.strerror}; name a writable directory") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock on the file `path`, which the kernel releases if this process dies.

    Yields whether there is one: some file systems have no locks, and on some they hold on one host alone.
    """
    descriptor = open_shared(path)
    try:
        held = False
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held = True
        yield held
    finally:
        os.close(descriptor)
