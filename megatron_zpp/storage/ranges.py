"""Reads ranges of a regular file, or of an object while its content stays what it was when it was opened."""

import contextlib
import os
from pathlib import Path
from typing import Protocol

from megatron_zpp.storage.location import Location
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
    if isinstance(path, Path):
        return _FileRanges(path)
    from megatron_zpp.storage.objects.ranges import ObjectRanges

    return ObjectRanges(path)


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
