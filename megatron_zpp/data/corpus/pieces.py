"""The encoded pieces of a run of the input, in its order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_zpp.data.corpus.encode import Encoded, Encoder
from megatron_zpp.data.corpus.inputs import Block, Span, lines_before, read_blocks
from megatron_zpp.data.corpus.ordered_map import ordered_map
from megatron_zpp.data.corpus.problems import Problem

BLOCK_BYTES = 256 << 10  # enough to hide the cost of handing it over, little enough to share out evenly


@dataclass(frozen=True)
class Piece:
    """One block's documents, and where the block lay."""

    encoded: Encoded
    span: Span
    lines_before: int  # lines of the span in earlier pieces
    text_bytes: int  # of the block, uncompressed
    disk_bytes: int  # of the block, as it lies in the file

    def where(self, problem: Problem) -> str:
        """`FILE line N` of a problem of this piece."""
        line = lines_before(self.span) + self.lines_before + problem.line
        return f"{self.span.path} line {line}"


def encode_spans(spans: Sequence[Span], build: Callable[[], Encoder], workers: int) -> Iterator[Piece]:
    """Reads and encodes the spans by `workers` processes. Raises what read_blocks and ordered_map raise."""
    handed_out: deque[Block] = deque()

    def contents() -> Iterator[bytes]:
        for span in spans:
            for block in read_blocks(span, BLOCK_BYTES):
                handed_out.append(block)
                yield block.content

    span, lines = None, 0
    with closing(ordered_map(build, contents(), workers)) as results:
        for encoded in results:
            block = handed_out.popleft()
            if block.span != span:
                span, lines = block.span, 0
            yield Piece(encoded, span, lines, len(block.content), block.disk_bytes)
            lines += encoded.lines
