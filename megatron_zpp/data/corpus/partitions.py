"""Encodes several runs of the input at once, then joins them in order.

One thread that reads, decompresses, hands out and writes keeps dozens of workers busy, but not hundreds. A
partition has its own (what it does releases the interpreter lock), with its own workers and its own files,
which cost as much disk again as the result until they are joined.
"""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.corpus.inputs import Span
from megatron_zpp.data.corpus.pieces import Piece, encode_spans
from megatron_zpp.data.indexed import IndexedDatasetWriter


class _Spool:
    """The documents of one key of one partition, on disk until their turn comes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._pieces: list[tuple[int, int, np.dtype]] = []  # documents and tokens of each

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._file.write(lengths.astype(np.int64, copy=False).tobytes())
        self._file.write(tokens.tobytes())
        self._pieces.append((lengths.size, tokens.size, tokens.dtype))

    def pour_into(self, writer: IndexedDatasetWriter) -> None:
        self._file.seek(0)
        for documents, tokens, dtype in self._pieces:
            lengths = np.frombuffer(self._file.read(documents * 8), dtype=np.int64)
            writer.add_documents(np.frombuffer(self._file.read(tokens * dtype.itemsize), dtype), lengths)


def encode_partitions(
    runs: Sequence[Sequence[Span]],
    build: Callable[[], Encoder],
    workers: int,
    writers: Sequence[IndexedDatasetWriter],
    observe: Callable[[Piece], None],
) -> None:
    """Encodes each run by `workers` processes and appends the documents of all, in order, to the writers.

    `writers` has one a key, already open: their lock on the prefix also guards the scratch directory, which
    lies beside the first. `observe` is told of every piece by one thread at a time; what it raises ends all.
    """
    stop, lock = threading.Event(), threading.Lock()

    def encode(spans: Sequence[Span], sinks: Sequence[IndexedDatasetWriter | _Spool]) -> None:
        with closing(encode_spans(spans, build, workers)) as pieces:
            for piece in pieces:
                if stop.is_set():
                    return
                for sink, *documents in zip(sinks, piece.encoded.tokens, piece.encoded.lengths, strict=True):
                    sink.add_documents(*documents)
                with lock:
                    observe(piece)

    if len(runs) == 1:
        encode(runs[0], writers)
        return

    with _scratch(Path(writers[0].prefix + ".partitions.partial")) as scratch, ExitStack() as stack:
        spools = [
            [stack.enter_context(_Spool(scratch / f"{run}-{key}")) for key in range(len(writers))]
            for run in range(len(runs))
        ]
        with ThreadPoolExecutor(len(runs)) as executor:
            try:
                for future in as_completed(
                    [executor.submit(encode, runs[k], spools[k]) for k in range(len(runs))]
                ):
                    future.result()
            except BaseException:
                stop.set()
                raise
        for row in spools:
            for spool, writer in zip(row, writers, strict=True):
                spool.pour_into(writer)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """An empty directory that is gone afterwards; one that a killed run left is emptied."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)
