"""Writes files and directories so that a kill leaves either the old state or the new one."""

import os
import shutil
from pathlib import Path


def fsync(path: Path) -> None:
    """Makes a file's bytes, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file that holds `text`, in one step."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    fsync(partial)
    os.replace(partial, path)
    fsync(path.parent)


def commit_directory(partial: Path, final: Path) -> None:
    """Gives a finished directory its final name; one that had the name before is removed afterwards."""
    for file in partial.iterdir():
        fsync(file)
    fsync(partial)
    retired = final.with_name(f"{final.name}.retired")
    if final.exists():
        os.replace(final, retired)
    os.replace(partial, final)  # a job killed here leaves the previous checkpoints whole
    fsync(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def check_writable(flag: str, directory: str) -> None:
    """Creates `directory` and proves that files can be made in it. Raises ValueError naming the flag."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        probe = Path(directory) / f".write-probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} {directory}: {error.strerror}; name a directory that can be written"
        ) from None
