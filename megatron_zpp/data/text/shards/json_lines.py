"""Shards of JSON lines, plain or compressed, cut into pieces of whole lines.

A piece of a plain file is the lines that begin in a range of its bytes. A piece of a compressed file is the
lines that begin in what a range of its compressed bytes adds, so the file need not be decompressed to be cut.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_zpp.data.corpus.compression import RATIO, decompressed, lines_by_chunk
from megatron_zpp.data.corpus.inputs import lines_that_begin
from megatron_zpp.data.text.shards.files import ShardFile


class JsonLinesShard:
    """An uncompressed file; any piece is read as fast as the first."""

    ratio = 1  # bytes of text per byte of the file, about

    def __init__(self, file: ShardFile, block_bytes: int) -> None:
        self.file = file
        self.pieces = -(-file.size // block_bytes)
        self.entries: Sequence[int] = range(self.pieces)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def read(self, piece: int) -> bytes:
        """Return the lines of a piece."""
        start, end = (self.file.size * edge // self.pieces for edge in (piece, piece + 1))
        with self.file.open() as raw:
            return lines_that_begin(raw, start, end)

    def location(self, piece: int, line: int) -> str:
        """Return the location of a line of a piece, counted from 1."""
        before = sum(self.read(number).count(b"\n") for number in range(piece))
        return f"{self.file.path} line {before + line}"


class CompressedShard:
    """A .gz or .zst file, which is read forward; reading an earlier piece begins at the start again."""

    ratio = RATIO

    def __init__(self, file: ShardFile, block_bytes: int) -> None:
        self.file = file
        self._chunk = max(1, block_bytes // RATIO)
        self.pieces = -(-file.size // self._chunk)
        self.entries: Sequence[int] = range(min(1, self.pieces))
        self._contents: Iterator[bytes] | None = None  # of the pieces from `_next` on
        self._next = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_contents": None, "_next": 0}

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        self._contents, self._next = None, 0  # ends the generator, which closes the file

    def read(self, piece: int) -> bytes:
        """Return the lines of a piece. Raises ValueError if compressed data is damaged or ends too early."""
        if self._contents is None or piece < self._next:
            self.close()
            self._contents = self._pieces()
        contents = self._contents
        self._contents = None  # an error below ends the iterator, which then must not be used again
        content = b""
        for _ in range(self._next, piece + 1):
            content = next(contents)
        self._next, self._contents = piece + 1, contents
        return content

    def location(self, piece: int, line: int) -> str:
        """Return the location of a line of a piece, counted from 1."""
        before = sum(content.count(b"\n") for content in itertools.islice(self._pieces(), piece))
        return f"{self.file.path} line {before + line}"

    def _pieces(self) -> Iterator[bytes]:
        lines = 0
        pieces = lines_by_chunk(self._chunks())
        while True:
            try:
                content = next(pieces)
            except StopIteration:
                return
            except ValueError as error:
                raise ValueError(f"{error} (after line {lines})") from None
            yield content
            lines += content.count(b"\n")

    def _chunks(self) -> Iterator[bytes]:
        with self.file.open() as raw:
            yield from decompressed(raw, self.file.path, self._chunk)
