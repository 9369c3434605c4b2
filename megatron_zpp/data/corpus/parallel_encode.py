"""Encodes the input in parallel, and appends its documents to the writers in the order of the input.

One thread that reads, decompresses, distributes and writes keeps dozens of workers busy, but not hundreds.
The input may therefore be encoded in several partitions. Each has its own thread (its work releases Python's
lock), workers and scratch files. Until the partitions are joined, the scratch files take as much disk as the
result.
"""

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_zpp.data.corpus.encode import Encoded, Encoder
from megatron_zpp.data.corpus.inputs import Block, Span, lines_before, read_blocks
from megatron_zpp.data.corpus.ordered_map import ordered_map
from megatron_zpp.data.corpus.problems import Problem
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.storage.files import open_new

BLOCK_BYTES = 256 << 10  # large enough to hide the cost of sending it, small enough to balance the load


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of one block, and the location of the block."""

    encoded: Encoded
    span: Span
    lines_before: int  # lines of the span in earlier pieces
    text_bytes: int  # of the block, uncompressed
    disk_bytes: int  # of the block, as stored in the file

    def where(self, problem: Problem) -> str:
        """Return `FILE line N` for a problem of this piece."""
        line = lines_before(self.span) + self.lines_before + problem.line
        return f"{self.span.path} line {line}"


def encode_partitions(
    partitions: Sequence[Sequence[Span]],
    build: Callable[[], Encoder],
    workers: int,
    writers: Sequence[IndexedDatasetWriter],
    observe: Callable[[EncodedBlock], None],
) -> None:
    """Encode each partition with `workers` processes and append all documents, in order, to the writers.

    `writers` has one open writer per key. Their lock on the prefix also protects the scratch directory, which
    is created beside the first. `observe` is called with every piece, by one thread at a time; if it raises,
    all partitions stop.
    """
    stop, lock = threading.Event(), threading.Lock()

    def encode(spans: Sequence[Span], sinks: Sequence[IndexedDatasetWriter | _Spool]) -> None:
        with closing(_encode_spans(spans, build, workers)) as pieces:
            for piece in pieces:
                if stop.is_set():
                    return
                for sink, *documents in zip(sinks, piece.encoded.tokens, piece.encoded.lengths, strict=True):
                    sink.add_documents(*documents)
                with lock:
                    observe(piece)

    if len(partitions) == 1:
        encode(partitions[0], writers)
        return

    with _scratch(Path(writers[0].prefix + ".partitions.partial")) as scratch, ExitStack() as stack:
        spools = [
            [stack.enter_context(_Spool(scratch / f"{number}-{key}")) for key in range(len(writers))]
            for number in range(len(partitions))
        ]
        with ThreadPoolExecutor(len(partitions)) as executor:
            try:
                for future in as_completed(
                    [executor.submit(encode, *pair) for pair in zip(partitions, spools, strict=True)]
                ):
                    future.result()
            except BaseException:
                stop.set()
                raise
        for row in spools:
            for spool, writer in zip(row, writers, strict=True):
                spool.copy_to(writer)


def _encode_spans(
    spans: Sequence[Span], build: Callable[[], Encoder], workers: int
) -> Generator[EncodedBlock, None, None]:
    """Read the spans and encode them with `workers` processes. Raises like read_blocks and ordered_map."""
    distributed: deque[Block] = deque()

    def contents() -> Iterator[bytes]:
        for span in spans:
            for block in read_blocks(span, BLOCK_BYTES):
                distributed.append(block)
                yield block.content

    span, lines = None, 0
    with closing(ordered_map(build, contents(), workers)) as results:
        for encoded in results:
            block = distributed.popleft()
            if block.span != span:
                span, lines = block.span, 0
            yield EncodedBlock(encoded, block.span, lines, len(block.content), block.disk_bytes)
            lines += encoded.lines


class _Spool:
    """The documents of one key and partition, kept on disk until the earlier partitions are written."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_new(path, os.O_RDWR), "w+b")
        self._pieces: list[tuple[int, int, np.dtype]] = []  # documents and tokens of each piece, token dtype

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._file.write(lengths.astype(np.int64, copy=False).tobytes())
        self._file.write(tokens.tobytes())
        self._pieces.append((lengths.size, tokens.size, tokens.dtype))

    def copy_to(self, writer: IndexedDatasetWriter) -> None:
        self._file.seek(0)
        for documents, tokens, dtype in self._pieces:
            lengths = np.frombuffer(self._file.read(documents * 8), dtype=np.int64)
            writer.add_documents(np.frombuffer(self._file.read(tokens * dtype.itemsize), dtype), lengths)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Create an empty directory and remove it afterwards; replaces the directory of a killed process."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)
