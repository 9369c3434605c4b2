"""Opens what a name stands for only where it is a regular file, and reads no more of it than a stated limit.

A name comes from a command line or from another file, so it may stand for anything: a FIFO blocks whoever opens
it, /dev/zero never ends, and a manifest of gigabytes exhausts the memory. A symbolic link to a regular file is
that file.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
# O_NONBLOCK: opening a FIFO returns at once. Reads of a regular file do not depend on it.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class NotRegular(OSError):
    """The name stands for a FIFO, a device or a socket; `strerror` says which."""


def open_regular(path: str | Path) -> int:
    """A descriptor of the regular file `path`, for reading; the caller closes it.

    Raises NotRegular, IsADirectoryError, and OSError as the file system does.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket's answer, before there is anything to look at
            raise NotRegular(errno.ENXIO, "is a socket, not a regular file", str(path)) from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise NotRegular(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_stream(path: str | Path, buffering: int = -1) -> BinaryIO:
    """The regular file `path` as a binary stream for reading; `buffering` as `open` takes it. Raises as `open_regular`."""
    return os.fdopen(open_regular(path), "rb", buffering=buffering)


def read_limited(path: str | Path, limit: int) -> bytes:
    """The contents of the regular file `path`, at most `limit` bytes.

    Raises OSError with EFBIG for a longer one, and as `open_regular` does.
    """
    with open_stream(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"is {size:,} bytes long, more than the {limit:,} it may have", str(path))
        parts, left = [], limit + 1  # what /proc holds is regular, of 0 bytes by its status
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"is longer than the {limit:,} bytes it may have", str(path))
    return b"".join(parts)
