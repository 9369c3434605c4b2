"""Sources of text: numbered blocks of whole documents, any of which is read as fast as the first."""

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.data.corpus.inputs import lines_that_begin
from megatron_zpp.data.order_cache import contents_of
from megatron_zpp.data.samples import Source
from megatron_zpp.data.text.order import GroupOrder
from megatron_zpp.storage.regular import open_stream

# About a thousand blocks, so that a split can be a thousandth of the text. A block is large enough for a
# file, and there are never so many that their directory becomes slow.
_BLOCKS, _MOST_BLOCKS = 1024, 1 << 16
_LEAST_BYTES, _MOST_BYTES = 1 << 10, 1 << 20
_GROUP_BYTES, _GROUP_BLOCKS = 16 << 20, 4  # that are shuffled together, at least
# Keys of `made_of` that may differ in a copy. "column" is the type of a column that is not of strings: its
# tokens cached before bytes were decoded must not be used again, but a resumed run finds the same data set.
_NOT_CONTENTS = ("name", "mtime_ns", "modified", "column")


class TextSource(Source):
    """Documents in `blocks` blocks; `group` consecutive blocks are shuffled together. Picklable."""

    blocks: int
    group: int
    size: int  # bytes
    made_of: Mapping[str, Any]  # distinguishes the text from other text and later versions

    @abstractmethod
    def order(self, first: int, last: int, seq_length: int, seed: int) -> GroupOrder:
        """Return the order in which an epoch reads the blocks [first, last)."""

    @abstractmethod
    def read(self, block: int) -> bytes:
        """Return the documents of a block as JSON lines. Raises ValueError if the text has changed."""

    @abstractmethod
    def location(self, block: int, line: int) -> str:
        """Return the location of a line of a block, counted from 1, for an error message."""

    def describe(self, blocks: int) -> str:
        """Return the size of `blocks` blocks in words."""
        return f"about {self.size * blocks // self.blocks:,} of {self.size:,} bytes of text"

    def fingerprint(self) -> str:
        """Also of compressed copies."""
        contents = {key: value for key, value in self.made_of.items() if key not in _NOT_CONTENTS}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]


class JsonLinesText(TextSource):
    """An uncompressed file of JSON lines; a line belongs to the block in which it begins."""

    def __init__(self, flag: str, name: str, path: str) -> None:
        """Open `path`, called `name` in messages. Raises ValueError if it is empty or cannot be read."""
        self.name, self._path = name, path
        try:
            self.made_of = contents_of(path)
        except OSError as error:
            raise option_error(flag, name, f"{one_line(error)}; name a file that can be read") from None
        self.size = self.made_of["size"]
        if not self.size:
            raise option_error(
                flag, name, "the file is empty (0 bytes); give a file with a JSON object per line"
            )
        usual = min(max(self.size // _BLOCKS, _LEAST_BYTES), _MOST_BYTES)
        self._bytes = max(usual, -(-self.size // _MOST_BLOCKS))
        self.blocks = -(-self.size // self._bytes)
        self.group = max(_GROUP_BLOCKS, _GROUP_BYTES // self._bytes)

    def order(self, first: int, last: int, seq_length: int, seed: int) -> GroupOrder:
        return GroupOrder(first, last, self.group, seed)

    def read(self, block: int) -> bytes:
        fix = "the file was there when the run began: restore it"
        if self._path != self.name:  # an unpacked copy
            fix = "start the run again"
        check_unchanged(self._path, self.name, (self.size, self.made_of["mtime_ns"]), fix)
        with open_stream(self._path) as raw:
            return lines_that_begin(raw, block * self._bytes, min((block + 1) * self._bytes, self.size))

    def location(self, block: int, line: int) -> str:
        before = sum(self.read(number).count(b"\n") for number in range(block))
        return f"{self.name} line {before + line}"


def check_unchanged(path: str, shown: str, before: tuple[int, int], fix: str) -> None:
    """Raise ValueError if a file was removed, or if size and modification time are not as `before`."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {fix}") from None
    if (status.st_size, status.st_mtime_ns) != before:
        raise ValueError(f"{shown}: has changed since the run began; start the run again")
