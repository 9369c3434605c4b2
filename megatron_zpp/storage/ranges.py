"""Reads ranges of a regular file, or of an object while its content stays what it was when it was opened."""

import contextlib
import os
from pathlib import Path
from typing import Protocol

from megatron_zpp.storage.object_path import Location, ObjectPath
from megatron_zpp.storage.object_store import Conflict, NoObject
from megatron_zpp.storage.regular import open_regular


class Ranges(Protocol):
    """An open file or object of `size` bytes. Thread-safe."""

    size: int

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill the beginning of `target` from `start` on. Returns the number of bytes, 0 at the end.

        Raises OSError.
        """

    def forget(self, start: int, size: int) -> None:
        """Make the next read of a range come from the storage, not from this machine's memory, if it can."""

    def close(self) -> None:
        """Close it."""


def open_ranges(path: Location) -> Ranges:
    """Open a file or object. Raises FileNotFoundError, UnfitFile for what is no regular file, OSError."""
    return ObjectRanges(path) if isinstance(path, ObjectPath) else _FileRanges(path)


class _FileRanges:
    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, target: memoryview) -> int:
        return os.preadv(self._descriptor, [target], start)

    def forget(self, start: int, size: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


class ObjectRanges:
    """An object. Reading raises Conflict, an OSError, once another content has replaced what was opened."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, status = path, path.status()
        self.size, self.modified, self.tag = status.size, status.modified, status.tag

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes [start, start + size), which must be in the object."""
        if not size:
            return b""
        try:
            return self._path.read(start, size, self.tag)
        except (Conflict, NoObject) as error:
            reason = "was replaced or removed while it was read; restore it and start again"
            raise Conflict(error.errno, reason, str(self._path)) from None

    def read_into(self, start: int, target: memoryview) -> int:
        """See Ranges."""
        content = self.read(start, min(len(target), self.size - start))
        target[: len(content)] = content
        return len(content)

    def forget(self, start: int, size: int) -> None:
        """Nothing of an object is kept."""

    def close(self) -> None:
        """Nothing is open between requests."""
