"""Opens regular files only, and reads them by range, or whole up to a stated limit.

A name that comes from a command line or another file may refer to anything: opening a FIFO waits for a
writer, /dev/zero never ends, and a manifest of gigabytes exhausts the memory. Symbolic links to regular
files are followed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, Union

from megatron_zpp.storage.files import naming
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.object_errors import ObjectError

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.path import ObjectRanges

_KINDS = {
    stat.S_IFDIR: "is a directory",
    stat.S_IFIFO: "is a FIFO, not a regular file",
    stat.S_IFCHR: "is a character device, not a regular file",
    stat.S_IFBLK: "is a block device, not a regular file",
    stat.S_IFSOCK: "is a socket, not a regular file",
}
# With O_NONBLOCK, opening a FIFO returns at once; it does not affect reads of a regular file.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_PIECE = 1 << 20  # bytes read at a time, because memory for all that is allowed may be more than there is
_Result = TypeVar("_Result")


class UnfitFile(OSError):
    """The file is not regular or too long; `strerror` says which, as in "is a FIFO"."""


def says_what_is_there(error: OSError) -> bool:
    """Return whether an error says that a file is missing or no regular file, not that reading failed."""
    return isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, UnfitFile))


def read_again_after_error(path: object, read: Callable[[], _Result]) -> _Result:
    """Return the result of `read`, which is called once more after an error that may pass.

    Network file systems return such errors (EIO, ESTALE) for a moment. Raises OSError, which names `path`, if
    the error persists. Object stores have retries of their own.
    """
    for last in (False, True):
        try:
            return read()
        except OSError as error:
            if isinstance(error, ObjectError) or says_what_is_there(error):
                raise
            if last:
                raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    raise AssertionError("the last attempt returns or raises")


def is_name(value: Any) -> bool:
    """Whether a value in a file can only be the name of a file beside it."""
    return (
        type(value) is str and value.isprintable() and value not in ("", "..") and Path(value).name == value
    )


def open_regular(path: str | Path) -> int:
    """Return a descriptor of the regular file `path` for reading, which the caller closes.

    Raises UnfitFile for anything else, and OSError from the file system.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket: it cannot be opened, so it has no descriptor to examine
            raise UnfitFile(errno.ENXIO, _KINDS[stat.S_IFSOCK], str(path)) from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise UnfitFile(errno.EINVAL, _KINDS.get(kind, "is not a regular file"), str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_stream(path: str | Path, buffering: int = -1) -> BinaryIO:
    """Return the regular file `path` as a binary stream. `buffering`: see `open`; errors: `open_regular`."""
    return os.fdopen(open_regular(path), "rb", buffering=buffering)


class FileRanges:
    """An open regular file of `size` bytes. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = str(path), open_regular(path)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill the beginning of `target` from `start` on. Returns the number of bytes, 0 at the end."""
        with naming(self._path):
            return os.preadv(self._descriptor, [target], start)

    def forget(self, start: int, size: int) -> None:
        """Make the next read of a range come from the storage, not from this machine's memory, if it can."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


Ranges: TypeAlias = Union[FileRanges, "ObjectRanges"]


def open_ranges(path: Location) -> Ranges:
    """Open a file or object. Raises FileNotFoundError, UnfitFile for what is no regular file, OSError."""
    if isinstance(path, Path):
        return FileRanges(path)
    return path.status()


def read_limited(path: str | Location, limit: int) -> bytes:
    """Return the content of the regular file `path`, or of an object.

    An error of the file system that may pass is met with a second attempt. Raises UnfitFile if the file is
    longer than `limit` bytes, and otherwise like `open_regular`, or ObjectError.
    """
    if not isinstance(path, (str, Path)):
        status = path.status()
        if status.size <= limit:
            return path.read(0, status.size, status.tag) if status.size else b""
        raise UnfitFile(errno.EFBIG, f"is longer than {limit:,} bytes", str(path))
    return read_again_after_error(path, lambda: _read_file(path, limit))


def _read_file(path: str | Path, limit: int) -> bytes:
    with open_stream(path, buffering=0) as file:
        left, parts = limit + 1, []
        if os.fstat(file.fileno()).st_size <= limit:
            while left and (part := file.read(min(left, _PIECE))):
                parts.append(part)
                left -= len(part)
            if left:
                return b"".join(parts)
    raise UnfitFile(errno.EFBIG, f"is longer than {limit:,} bytes", str(path))
