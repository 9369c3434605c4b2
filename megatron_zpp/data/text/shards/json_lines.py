"""Shards of JSON lines, plain or compressed, cut into pieces of whole lines.

A piece of a plain file is the lines that begin in a range of its bytes. A piece of a compressed file is the
lines that begin in what a range of its compressed bytes adds, so the file need not be decompressed to be cut.
"""

import itertools
from collections.abc import Generator, Sequence

from megatron_zpp.data.corpus.compression import RATIO, decompressed, lines_by_chunk
from megatron_zpp.data.corpus.inputs import lines_that_begin
from megatron_zpp.data.text.shards.files import Shard, ShardFile


class JsonLinesShard(Shard):
    """An uncompressed file; any piece is read as fast as the first."""

    ratio = 1  # bytes of text per byte of the file, about

    def __init__(self, file: ShardFile, block_bytes: int) -> None:
        self.file = file
        self.pieces = -(-file.size // block_bytes)
        self.entries: Sequence[int] = range(self.pieces)

    def read(self, piece: int) -> bytes:
        start, end = (self.file.size * edge // self.pieces for edge in (piece, piece + 1))
        with self.file.open() as raw:
            return lines_that_begin(raw, start, end)

    def location(self, piece: int, line: int) -> str:
        before = sum(self.read(number).count(b"\n") for number in range(piece))
        return f"{self.file.path} line {before + line}"


class CompressedShard(Shard):
    """A .gz or .zst file, which is read forward; reading an earlier piece begins at the start again."""

    ratio = RATIO

    def __init__(self, file: ShardFile, block_bytes: int) -> None:
        self.file = file
        self._chunk = max(1, block_bytes // RATIO)
        self.pieces = -(-file.size // self._chunk)
        self.entries: Sequence[int] = range(min(1, self.pieces))

    def read(self, piece: int) -> bytes:
        if self._items is None or piece < self._next:
            self._begin(self._pieces(), 0)
        return self._take(piece, piece + 1)[0]

    def location(self, piece: int, line: int) -> str:
        before = sum(content.count(b"\n") for content in itertools.islice(self._pieces(), piece))
        return f"{self.file.path} line {before + line}"

    def _pieces(self) -> Generator[bytes, None, None]:
        lines = 0
        try:
            with self.file.open() as raw:
                for content in lines_by_chunk(decompressed(raw, self.file.path, self._chunk)):
                    yield content
                    lines += content.count(b"\n")
        except ValueError as error:
            raise ValueError(f"{error} (after line {lines})") from None
