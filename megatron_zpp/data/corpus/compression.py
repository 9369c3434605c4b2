"""Reads and writes .gz and .zst files as if they were not compressed."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_zpp.storage.files import open_new

_CHUNK = 32 << 10  # compressed bytes; a whole decompressed chunk is in memory
_LONGEST_WINDOW = 1 << 31  # bytes; the most that `zstd --long=31` writes, and takes as much memory


class Writable(Protocol):
    """A stream that accepts bytes."""

    def write(self, content: bytes, /) -> int:
        """Write all of `content`."""


class Decompressed(io.RawIOBase):
    """The contents of a .gz or .zst file with one or more members.

    Raises ValueError with the file's name if the file is damaged or ends too early, so that an incomplete
    download is not mistaken for a smaller file.
    """

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self._raw = raw
        self._decompressor = Decompressor(path)
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            compressed = self._raw.read(_CHUNK)
            if not compressed:
                self._decompressor.finish()
                return 0
            self._plain = memoryview(self._decompressor.feed(compressed))
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count


class Decompressor:
    """Decompresses consecutive pieces of a .gz or .zst file; raises the errors of `Decompressed`.

    As in `gzip`, zero bytes after a member of a .gz file are padding.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._member: Any = None  # decoder of zlib or zstandard; None between members
        self._begun = False
        self._padded = False  # whether zero bytes may come before the next member

    def feed(self, compressed: bytes) -> bytes:
        """Return everything that `compressed` adds to what was decompressed before."""
        plain = []
        self._begun = self._begun or bool(compressed)
        while compressed:
            if self._member is None and self._padded:
                compressed = compressed.lstrip(b"\0")
                if not compressed:
                    break
            if self._member is None:
                self._member = _member_decoder(self._path)
            try:
                plain.append(self._member.decompress(compressed))
            except Exception as error:  # zlib.error, or zstandard.ZstdError of an optional package
                raise ValueError(
                    f"{self._path}: the compressed data is damaged ({error}); create it again"
                ) from None
            compressed = self._member.unused_data if self._member.eof else b""
            if self._member.eof:
                self._member, self._padded = None, self._path.endswith(".gz")
        return b"".join(plain)

    def finish(self) -> None:
        """Raise ValueError if the file ends here, but a member does not, or none has begun."""
        if self._member is not None or not self._begun:
            raise ValueError(
                f"{self._path}: the file ends in the middle of its compressed data; create it again"
            )


def _member_decoder(path: str) -> Any:
    if path.endswith(".gz"):
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()


@contextmanager
def replacing(path: str) -> Iterator[Writable]:
    """Yield a stream for the new contents of `path`, compressed according to its name.

    The new file gets its name when the block ends and everything is on disk; an error or a kill before that
    leaves the old file as it was.
    """
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with os.fdopen(open_new(Path(partial)), "wb") as raw:
            with _compressing(raw, path) as stream:
                yield stream
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


@contextmanager
def _compressing(raw: BinaryIO, path: str) -> Iterator[Writable]:
    if path.endswith(".gz"):
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as stream:
            yield stream
    elif path.endswith(".zst"):
        import zstandard

        with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as stream:
            yield stream
    else:
        yield raw
