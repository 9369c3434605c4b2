"""What text is read from: numbered blocks of whole documents, each as near as the first."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.data.corpus.inputs import Span, lines_before, read_blocks
from megatron_zpp.data.order_cache import contents_of

# About a thousand blocks, so that a split finds its thousandth; of a size that is worth a file of its own,
# and never so many that a directory of them becomes slow.
_BLOCKS, _MOST_BLOCKS = 1024, 1 << 16
_LEAST_BYTES, _MOST_BYTES = 1 << 10, 1 << 20
_GROUP_BYTES = 16 << 20
_PLACE = ("name", "mtime_ns")  # what of `made_of` a copy need not share
GROUP_BLOCKS = 4


class TextSource(Protocol):
    """Documents in `blocks` blocks, of which `group` in a row are shuffled together; picklable."""

    name: str  # as it was given
    blocks: int
    group: int
    size: int  # bytes of a file, rows of a data set
    made_of: Mapping[str, Any]  # what tells it from other or later text

    def read(self, block: int) -> bytes:
        """The documents of a block as JSON lines. Raises ValueError when the text has changed since."""

    def place(self, block: int, line: int) -> str:
        """Where a line of a block, counted from 1, is found by a person."""

    def describe(self, blocks: int) -> str:
        """How much text so many of the blocks are."""


class JsonLinesText:
    """A file of JSON lines that is not compressed; a line belongs to the block in which it begins."""

    def __init__(self, flag: str, name: str, path: str) -> None:
        """`name` is what a person calls the file at `path`. Raises ValueError when there is no text."""
        self.name, self._path = name, path
        try:
            self.made_of = contents_of(path)
        except OSError as error:
            raise option_error(flag, name, f"{one_line(error)}; name a file that can be read") from None
        self.size = self.made_of["size"]
        if not self.size:
            raise option_error(flag, name, "the file is empty (0 bytes); give one with a JSON object a line")
        self._bytes = size_of_block(self.size, _LEAST_BYTES, _MOST_BYTES)
        self.blocks = -(-self.size // self._bytes)
        self.group = max(GROUP_BLOCKS, _GROUP_BYTES // self._bytes)

    def read(self, block: int) -> bytes:
        status = os.stat(self._path)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.made_of["mtime_ns"]):
            raise ValueError(f"{self.name}: has changed since the run began; start it again")
        return b"".join(piece.content for piece in read_blocks(self._span(block), self._bytes))

    def place(self, block: int, line: int) -> str:
        return f"{self.name} line {lines_before(self._span(block)) + line}"

    def describe(self, blocks: int) -> str:
        return f"about {self.size * blocks // self.blocks:,} of {self.size:,} bytes of text"

    def _span(self, block: int) -> Span:
        return Span(self._path, block * self._bytes, min((block + 1) * self._bytes, self.size))


def size_of_block(size: int, least: int, most: int) -> int:
    return max(min(max(size // _BLOCKS, least), most), -(-size // _MOST_BLOCKS))


def fingerprint_of(source: TextSource) -> str:
    """The same for a copy elsewhere, also a compressed one: of what tells the text, not its place or time."""
    told = {key: value for key, value in source.made_of.items() if key not in _PLACE}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]
