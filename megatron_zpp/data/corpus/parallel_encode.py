"""Encodes files of JSON lines by several processes, in the order of the input.

One thread that reads, decompresses, distributes and writes keeps dozens of workers busy.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_zpp.data.corpus.encode import Encoded, Encoder
from megatron_zpp.data.corpus.inputs import Block, read_blocks
from megatron_zpp.data.corpus.ordered_map import ordered_map
from megatron_zpp.data.corpus.problems import Problem

_BLOCK_BYTES = 256 << 10  # large enough to hide the cost of sending it, small enough to balance the load


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of one block, and the location of the block."""

    encoded: Encoded
    path: str
    lines_before: int  # lines of the file in earlier blocks
    text_bytes: int  # of the block, uncompressed
    disk_bytes: int  # of the block, as stored in the file

    def where(self, problem: Problem) -> str:
        """Return `FILE line N` for a problem of this block."""
        return f"{self.path} line {self.lines_before + problem.line}"


def encode_files(files: Sequence[str], build: Callable[[], Encoder], workers: int) -> Iterator[EncodedBlock]:
    """Yield all blocks of the files, encoded by `workers` processes. Raises like read_blocks, ordered_map."""
    distributed: deque[tuple[str, Block]] = deque()

    def contents() -> Iterator[bytes]:
        for path in files:
            for block in read_blocks(path, _BLOCK_BYTES):
                distributed.append((path, block))
                yield block.content

    current, lines = "", 0
    with closing(ordered_map(build, contents(), workers)) as results:
        for encoded in results:
            path, block = distributed.popleft()
            if path != current:
                current, lines = path, 0
            yield EncodedBlock(encoded, path, lines, len(block.content), block.disk_bytes)
            lines += encoded.lines
