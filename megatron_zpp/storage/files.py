"""Writes files and directories so that a kill leaves either the old state or the new one."""

import contextlib
import errno
import os
import platform
import shutil
import stat
from pathlib import Path

_CANNOT = (errno.EINVAL, errno.ENOTSUP)  # some network file systems' answers for a directory


def fsync(path: Path) -> None:
    """Makes a file's bytes, or a directory's entries where that is possible, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file that survives a power cut, but for its name: that is its directory's."""
    path.write_bytes(content)
    fsync(path)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file that holds `text`, in one step; on an error it stays as it was."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write_durably(partial, text.encode())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def commit_directory(partial: Path, final: Path, retired: Path) -> None:
    """Gives a directory of durable files its final name; one that had the name before is removed afterwards.

    Between the two renames the previous one is whole under the name `retired`.
    """
    fsync(partial)
    if final.exists():
        shutil.rmtree(retired, ignore_errors=True)
        os.replace(final, retired)
    os.replace(partial, final)
    fsync(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def check_replaceable(flag: str, path: str) -> None:
    """Proves that the file `path` can be made or replaced. Raises ValueError naming the flag."""
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
    """The path, or the first above it that is there."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        if path == path.parent:
            raise  # the present directory was removed under us
        return _nearest(path.parent)
    return path


def check_writable(flag: str, directory: str) -> None:
    """Proves that files can be made in `directory`, or where that is to be made, and leaves nothing there.

    Raises ValueError naming the flag.
    """
    try:
        probe = _nearest(Path(directory)) / f".write-probe-{platform.node()}-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} {directory}: {error.strerror}; name a directory that can be written"
        ) from None
