"""Where a lease is written: a file of a directory, or an object of an object store.

Both have the same operations, of which only one process succeeds at a time. A file is created with O_EXCL and
then rewritten in place, without locks. An object is written by conditional requests, which the store refuses
if the object is not the one that this process has read or written last.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import read_limited

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.lease_record import ObjectRecord

_LIMIT = 4096  # bytes of the record
_SETTLE = 0.5  # seconds between taking over a file and reading it again


class FileRecord:
    """A record in a file. All methods raise OSError, also if another process has written it meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made_directory = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = None

    def read(self) -> bytes | None:
        """Return the content; None if there is none."""
        try:
            return read_limited(self._path, _LIMIT)
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> None:
        """Write a record where there is none. Raises FileExistsError, or Conflict, if there is one."""
        self._create(self._path, content)

    def take_over(self, content: bytes, name: str) -> None:
        """Replace the record that was read last. `name` is unique to this process.

        The caller must read the record afterwards: another process may have done the same.
        """
        self._create(partial := self._path.with_name(f"{self._path.name}.{name}"), content)
        os.replace(partial, self._path)
        time.sleep(_SETTLE)  # if two processes take it over at once, the later one holds it

    def renew(self, content: bytes) -> None:
        """Replace the record that this process has written, by one of the same length.

        By descriptor, so that a file that replaced it meanwhile is not overwritten.
        """
        assert self._descriptor is not None
        _rewrite(self._descriptor, content)

    def remove(self) -> None:
        """Remove the record, and the directory if it was made for it and is empty."""
        self._path.unlink()
        if self._made_directory:
            with contextlib.suppress(OSError):  # the directory is not empty
                self._path.parent.rmdir()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # network file systems report errors here; all is on disk
                os.close(descriptor)

    def _create(self, path: Path, content: bytes) -> None:
        """Create the file, which only one process can do, and keep a descriptor for rewriting it."""
        self.close()  # of a file that another process has taken over
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _rewrite(descriptor, content)
            fsync(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor


Record: TypeAlias = Union[FileRecord, "ObjectRecord"]


def record_of(path: Location) -> Record:
    """Return the record at `path`. Raises OSError if it cannot be written there."""
    if isinstance(path, Path):
        return FileRecord(path)
    from megatron_zpp.storage.objects.lease_record import ObjectRecord

    return ObjectRecord(path)


def _rewrite(descriptor: int, content: bytes) -> None:
    os.pwrite(descriptor, content, 0)
    os.fsync(descriptor)  # so that other clients of a network file system see it
