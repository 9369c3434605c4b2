"""Text in shards: many files of one data set, of which only what the next samples need is read."""

import copy
import hashlib
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import PARQUET, SUFFIXES
from megatron_zpp.config.words import counted
from megatron_zpp.data.samples import ShardRecord
from megatron_zpp.data.text.order import ShardOrder
from megatron_zpp.data.text.shards.files import Shard, examine_files
from megatron_zpp.data.text.shards.json_lines import CompressedShard, JsonLinesShard
from megatron_zpp.data.text.shards.parquet import ParquetShard, read_indexes
from megatron_zpp.data.text.sources import TextSource

# About a thousand blocks of 1 KiB to 1 MiB; in more than 64 GiB of text the blocks grow to 4 MiB.
_BLOCKS, _MANY_BLOCKS = 1024, 1 << 16
_LEAST_BYTES, _MOST_BYTES, _LARGEST = 1 << 10, 1 << 20, 4 << 20
_GROUP_BYTES, _GROUP_BLOCKS = 16 << 20, 8
_LEAST_WINDOWS, _TOKEN_BYTES = 16, 4  # per group; bytes of text per token, about
_PARTS = 8  # groups of a text, at least: the first sample must not wait for all of a small text
_STRETCHES, _LONGEST = 128, 64  # of a text; blocks
_OPEN = 16  # files that stay open for the next block


class ShardedText(TextSource):
    """The pieces of all shards, in the order of the shards."""

    def __init__(
        self, name: str, shards: Sequence[Shard], size: int, block_bytes: int, kinds: Sequence[str] = ()
    ) -> None:
        """`size` is the bytes of text in all shards, about `block_bytes` of them per piece.

        `kinds` names the types of the column in Parquet files in which it is not of strings.
        """
        self.name, self.size = name, size
        self._shards, self._block_bytes = shards, block_bytes
        self._ends = np.cumsum([shard.pieces for shard in shards])  # block after the last one of each shard
        self.blocks = int(self._ends[-1])
        self.group = min(max(_GROUP_BLOCKS, _GROUP_BYTES // block_bytes), -(-self.blocks // _PARTS))
        self.stretches = np.array([0, *self._stretch_ends()])
        contents = hashlib.sha256("\n".join(shard.file.contents for shard in shards).encode())
        modified = hashlib.sha256("\n".join(str(shard.file.modified) for shard in shards).encode())
        self.made_of = {
            "name": name,
            "shards": len(shards),
            "contents": contents.hexdigest(),
            "modified": modified.hexdigest(),
            "blocks": self.blocks,
            **({"column": ", ".join(kinds)} if kinds else {}),
        }
        self._open: dict[int, Shard] = {}  # by stretch, the last one used at the end
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}, "_process": 0}

    def order(self, first: int, last: int, seq_length: int, seed: int) -> ShardOrder:
        """Return the order of [first, last). A group has more blocks than usual if it would be too small."""
        least = _LEAST_WINDOWS * _TOKEN_BYTES * seq_length
        group = max(self.group, -(-least // self._block_bytes))
        return ShardOrder(first, last, group, seed, stretches=self.stretches)

    def shards(self) -> tuple[ShardRecord, ...]:
        return tuple(shard.file.record() for shard in self._shards)

    def read(self, block: int) -> bytes:
        _, piece = self._find(block)
        shard = self._opened(block)
        shard.file.check()
        try:
            return shard.read(piece)
        except ValueError:
            raise
        except Exception as error:  # of fsspec and its servers, after their own attempts
            fix = "check the file and the network"
            raise ValueError(f"{shard.file.path}: cannot be read ({one_line(error)}); {fix}") from None

    def location(self, block: int, line: int) -> str:
        number, piece = self._find(block)
        return self._shards[number].location(piece, line)

    def describe(self, blocks: int) -> str:
        count = len(self._shards)
        return f"{super().describe(blocks)} in {counted(count, 'shard')}"

    def _find(self, block: int) -> tuple[int, int]:
        """Return (shard, its piece) of a block."""
        number = int(np.searchsorted(self._ends, block, side="right"))
        return number, block - int(self._ends[number]) + self._shards[number].pieces

    def _opened(self, block: int) -> Shard:
        """Return the shard of a block as its stretch has left it, so that each stretch is read forward.

        The one that was used least recently is closed.
        """
        if self._process != os.getpid():  # a fork shares the positions of open files with its parent
            self._open, self._process = {}, os.getpid()
        stretch = int(np.searchsorted(self.stretches, block, side="right"))
        shard = self._open.pop(stretch, None)
        if shard is None:
            shard = copy.copy(self._shards[self._find(block)[0]])
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
        self._open[stretch] = shard
        return shard

    def _stretch_ends(self) -> list[int]:
        """Return the block after each stretch: part of a shard, which is read forward from an entry."""
        least = min(max(1, self.blocks // _STRETCHES), _LONGEST)
        ends: list[int] = []
        for shard, (first, last) in zip(self._shards, pairwise([0, *self._ends.tolist()]), strict=True):
            begin = 0
            for entry in shard.entries:
                if entry - begin >= least:
                    ends.append(first + entry)
                    begin = entry
            if last > first:
                ends.append(last)
        return ends


def open_shards(flag: str, name: str, paths: Sequence[str], key: str, directory: Path) -> ShardedText:
    """Open the files `paths` of the data set `name`: Parquet, or JSON lines.

    Indexes of remote files are kept in `directory`. Raises ValueError if there is no text, a file cannot be
    read, a compressed file is empty, or a Parquet file has no column `key`.
    """
    formats = {path.endswith(PARQUET) for path in paths}
    if len(formats) > 1:
        raise option_error(flag, name, "has both Parquet and JSON lines; give each its own path and weight")
    files = examine_files(flag, paths)
    shards: list[Shard] = []
    kinds: set[str] = set()
    if formats == {True}:
        indexes = read_indexes(flag, name, files, key, directory)
        kinds = {index.kind for index in indexes if index.kind}
        size = sum(index.size[-1] for index in indexes)
        block_bytes = _bytes_of_block(size)
        shards += [
            ParquetShard(file, key, index, block_bytes) for file, index in zip(files, indexes, strict=True)
        ]
    else:
        forms = [CompressedShard if file.path.endswith(SUFFIXES) else JsonLinesShard for file in files]
        pairs = list(zip(files, forms, strict=True))
        for file, form in pairs:
            if form is CompressedShard and not file.size:
                fix = "the file ends in the middle of its compressed data; create it again"
                raise option_error(flag, file.path, fix)
        size = sum(file.size * form.ratio for file, form in pairs)
        block_bytes = _bytes_of_block(size)
        shards += [form(file, block_bytes) for file, form in pairs]
    if not sum(shard.pieces for shard in shards):
        what = "rows" if formats == {True} else "bytes"
        raise option_error(flag, name, f"its {len(files):,} files have no {what}; name others")
    return ShardedText(name, shards, size, block_bytes, sorted(kinds))


def _bytes_of_block(size: int) -> int:
    usual = min(max(size // _BLOCKS, _LEAST_BYTES), _MOST_BYTES)
    return max(usual, min(size // _MANY_BLOCKS, _LARGEST))
