"""Arrays that stay in their file: what is asked for is read with pread.

A mapped file that another program shortens ends the run with SIGBUS, and no line. A read that comes up short
is an error with a name and a place. pread moves no file position, so threads and forked workers share a
descriptor.
"""

import errno
import math
import os
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.regular import open_regular

_NEAR = 1 << 15  # bytes; numbers that lie so near one another are read at once
_CHUNK = 1 << 20  # rows
_OPEN_FILES = 1 << 16  # wanted where the limit is lower: a blend holds several for each data set


class OpenFile:
    """A regular file that stays open for as long as this object lives.

    path   as it was given
    size   bytes, when it was opened

    Raises OSError as the file system does, and UnfitFile where there is no regular file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._descriptor = _open(self.path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, size: int) -> bytes:
        """The bytes [start, start + size). Raises DamagedFile where the file no longer has them."""
        try:
            content = os.pread(self._descriptor, size, start)
            if len(content) == size:
                return content
            parts = [content]  # a file system may give less than it is asked for
            done = len(content)
            while content and done < size:
                content = os.pread(self._descriptor, size - done, start + done)
                parts.append(content)
                done += len(content)
            now = os.fstat(self._descriptor).st_size
        except OSError as error:
            end = start + size
            raise DamagedFile(
                f"{self.path}: bytes {start} to {end} cannot be read: {error.strerror}"
            ) from None
        if done < size:
            raise DamagedFile(
                f"{self.path}: has {now} bytes, and had {self.size} when it was opened: another program has "
                "shortened it; restore it and start again"
            )
        return b"".join(parts)

    def read_each(self, starts: list[int], sizes: list[int]) -> bytes:
        """The bytes [start, start + size) of each start, joined. Raises as `read`."""
        descriptor, pread = self._descriptor, os.pread
        try:
            content = b"".join(
                [pread(descriptor, size, start) for start, size in zip(starts, sizes, strict=True)]
            )
        except OSError:
            content = b""
        if len(content) == sum(sizes):
            return content
        return b"".join([self.read(start, size) for start, size in zip(starts, sizes, strict=True)])


class FileArray:
    """An array (N, …) in C order of which rows are read as they are indexed: by a slice, a number, or
    numbers.

    Each read gives a new array in memory, which is read-only where it is a slice. Raises DamagedFile where
    the file has become shorter, IndexError for numbers outside [0, N).
    """

    def __init__(self, file: OpenFile, dtype: np.dtype | str, offset: int, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self.size = math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._file, self._offset, self._length, self._row = file, offset, shape[0], shape[1:]
        self._row_bytes = math.prod(self._row) * self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(self._length)
            assert step == 1, f"rows are read in a row, not with step {step}"
            return self._read(start, max(stop, start))
        if isinstance(key, np.ndarray):
            return self._take(key)
        number = key if key >= 0 else key + self._length
        self._check(number, number)
        return self._read(number, number + 1)[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """All of it."""
        return self[:].astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The rows [start, start + length) of each start, one after the other; lengths are 0 or more."""
        if not starts.size:
            return self._as_rows(b"")
        self._check(int(starts.min()), int((starts + lengths).max()) - 1)
        places = self._offset + starts * self._row_bytes
        return self._as_rows(self._file.read_each(places.tolist(), (lengths * self._row_bytes).tolist()))

    def part(self, first: int, last: int) -> "FileArray":
        """The rows [first, last) as an array of their own, of which nothing is read yet."""
        assert 0 <= first <= last <= self._length, f"rows {first} to {last} of {self._length}"
        offset = self._offset + first * self._row_bytes
        return FileArray(self._file, self.dtype, offset, (last - first, *self._row))

    def chunks(self) -> Iterator[np.ndarray]:
        """All rows, some at a time, so that memory does not grow with their number."""
        for first in range(0, self._length, _CHUNK):
            yield self[first : first + _CHUNK]

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self._row_bytes
        return self._as_rows(self._file.read(self._offset + start * size, (stop - start) * size))

    def _take(self, numbers: np.ndarray) -> np.ndarray:
        if not numbers.size:
            return self._as_rows(b"")
        low, high = int(numbers.min()), int(numbers.max())
        self._check(low, high)
        if (high - low) * self._row_bytes < _NEAR:
            return self._read(low, high + 1)[numbers - low]
        return self.gather(numbers.astype(np.int64, copy=False), np.ones(len(numbers), np.int64))

    def _as_rows(self, content: bytes) -> np.ndarray:
        found = np.frombuffer(content, self.dtype)
        return found.reshape(-1, *self._row) if self._row else found

    def _check(self, low: int, high: int) -> None:
        if low < 0 or high >= self._length:
            raise IndexError(f"{self._file.path}: rows {low} to {high} of {self._length}")


def _open(path: str) -> int:
    """Raises the limit of open files, as far as this process may, when it is reached."""
    try:
        return open_regular(path)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        if error.errno != errno.EMFILE or wanted <= soft:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return open_regular(path)
