"""Reads .gz and .zst files as if they were not compressed."""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

RATIO = 4  # assumed bytes of text per byte of a compressed file
_LONGEST_WINDOW = 1 << 31  # bytes; the most that `zstd --long=31` writes, and takes as much memory


def decompressed(raw: BinaryIO, path: str, chunk: int) -> Iterator[bytes]:
    """Yield what each `chunk` bytes of a .gz or .zst file, with one or more members, add to its contents.

    As in `gzip`, zero bytes after a member of a .gz file are padding. Raises ValueError with the file's name
    if the file is damaged or ends too early, so that an incomplete download is not mistaken for a smaller
    file: at the latest in place of the last chunk.
    """
    member: Any = None  # decoder of zlib or zstandard; None between members
    padded = False  # whether zero bytes may come before the next member
    following = raw.read(chunk)
    if not following:
        raise _too_short(path)
    while following:
        compressed, following, plain = following, raw.read(chunk), []
        while compressed:
            if member is None and padded:
                compressed = compressed.lstrip(b"\0")
                if not compressed:
                    break
            member = member or _member_decoder(path)
            try:
                plain.append(member.decompress(compressed))
            except Exception as error:  # zlib.error, or zstandard.ZstdError of an optional package
                raise ValueError(
                    f"{path}: the compressed data is damaged ({error}); create it again"
                ) from None
            compressed = member.unused_data if member.eof else b""
            if member.eof:
                member, padded = None, path.endswith(".gz")
        if member is not None and not following:
            raise _too_short(path)
        yield b"".join(plain)


def lines_by_chunk(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield for each chunk of a text the lines that begin in it: whole, also if they end in a later chunk."""
    held: list[bytes] = []  # the lines of a chunk whose last line has not ended
    empty = 0  # later chunks in which no line begins
    for chunk in chunks:
        rest = chunk
        if held:
            end = chunk.find(b"\n") + 1
            held.append(chunk[:end] if end else chunk)
            if not end:
                empty += 1
                continue
            yield b"".join(held)
            yield from [b""] * empty
            held, empty, rest = [], 0, chunk[end:]
        if rest and not rest.endswith(b"\n"):
            held = [rest]
        else:
            yield rest
    if held:
        yield b"".join(held)
        yield from [b""] * empty


def _too_short(path: str) -> ValueError:
    return ValueError(f"{path}: the file ends in the middle of its compressed data; create it again")


def _member_decoder(path: str) -> Any:
    if path.endswith(".gz"):
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()
