"""Arrays that stay in their files: rows are read with pread when they are indexed.

If another program shortens a mapped file, SIGBUS ends the run without a message; a short read gives an error
with the file and the offset. pread does not move the file position, so threads and forked workers can share a
descriptor.
"""

import contextlib
import errno
import math
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from megatron_zpp.distributed.open_files import raise_limit
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.regular import open_regular

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.files import ObjectFile

_NEAR = 1 << 15  # bytes; rows within this distance are fetched by one read


class OpenFile:
    """A regular file that stays open for as long as this object lives; a process that gets it opens it again.

    `size` is its bytes when it was opened. Raises OSError, and UnfitFile if the file is not regular.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._descriptor = _open(self.path)
        weakref.finalize(self, _close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def __reduce__(self) -> tuple[type["OpenFile"], tuple[str]]:
        return OpenFile, (self.path,)

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes [start, start + size). Raises DamagedFile if the file no longer has them."""
        try:
            content = part = os.pread(self._descriptor, size, start)
            while part and len(content) < size:  # a file system may return fewer bytes than requested
                part = os.pread(self._descriptor, size - len(content), start + len(content))
                content += part
            if len(content) == size:
                return content
            now = os.fstat(self._descriptor).st_size
        except OSError as error:
            where = f"{self.path}: bytes {start} to {start + size}"
            raise DamagedFile(f"{where} cannot be read: {error.strerror}") from None
        fix = "another program has shortened it; restore it and start again"
        raise DamagedFile(f"{self.path}: has {now} bytes, and had {self.size} when it was opened: {fix}")

    def read_each(self, starts: list[int], sizes: list[int]) -> bytes:
        """Return the bytes [start, start + size) of each start, concatenated. Raises like `read`."""
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


AnyFile: TypeAlias = Union[OpenFile, "ObjectFile"]


class FileArray:
    """An array (N, …) in C order whose rows are read when indexed: by a slice, a number, or numbers.

    Each read returns a new array in memory, read-only for a slice. Raises DamagedFile if the file has become
    shorter, IndexError for numbers outside [0, N).
    """

    def __init__(self, file: AnyFile, dtype: np.dtype | str, offset: int, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self.size = math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._file, self._offset, self._row = file, offset, shape[1:]
        self._row_bytes = math.prod(self._row) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, f"the step of a slice must be 1, got {step}"
            return self._read(start, max(stop, start))
        if isinstance(key, np.ndarray):
            return self._take(key)
        number = key if key >= 0 else key + len(self)
        self._check(number, number)
        return self._read(number, number + 1)[0]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the rows [start, start + length) of each start, concatenated; lengths are 0 or more."""
        if not starts.size:
            return self._as_rows(b"")
        self._check(int(starts.min()), int((starts + lengths).max()) - 1)
        places = self._offset + starts * self._row_bytes
        return self._as_rows(self._file.read_each(places.tolist(), (lengths * self._row_bytes).tolist()))

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
        if low < 0 or high >= len(self):
            raise IndexError(f"{self._file.path}: rows {low} to {high} of {len(self)}")


def _close(descriptor: int) -> None:
    """Close a file that was only read: an error of a network file system then means nothing."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _open(path: str) -> int:
    """Open the file; if the limit of open files is reached, raise it as far as this process may."""
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    raise_limit()  # a blend holds several files open per data set
    return open_regular(path)
