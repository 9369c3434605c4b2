"""The tokens of a text, block by block, made by whichever process needs a block first.

    counts       for each block: tokens, lines left out, and a check of both; 0 where nobody has made it
    claims       empty; a process that makes block n holds a lock on its byte n
    000/0000012  the tokens of block 12 behind their digest

Whoever waits for blocks makes those that nobody else is at. So the workers of all ranks of a machine, and of
all machines that share the directory, tokenise every block once, in the order in which the run reads it. A
process that dies gives up its claims; a file system without locks has a block made twice, to the same bytes.
Nothing here is relied on: what is damaged or gone is made again.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import get_worker_info

from megatron_zpp.config.options import option_error
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.corpus.encode import NO_TOKENS, Encoded, Encoder
from megatron_zpp.data.corpus.json_lines import split_lines
from megatron_zpp.data.corpus.problems import Problem
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.stateless_random import random_bits
from megatron_zpp.data.text.sources import TextSource
from megatron_zpp.storage.files import write_durably
from megatron_zpp.storage.regular import read_limited

_RECORD = np.dtype([("tokens", "<u8"), ("left_out", "<u8"), ("check", "<u8")])
_DIGEST = 16  # bytes
_POLL = 0.02  # seconds between two looks at what others make
_PARTS = 16  # a worker's share comes in so many, so that the quick ones take more


class TokenCache:
    """The tokens of the blocks of `source`, in `directory`, which exists.

    `build` makes the encoder, in the process that tokenises: with `workers` above 0 that is a worker of a
    loader, never the process that trains. Lines without a document raise ValueError, naming the first, unless
    `skip` is set; a document that has no tokens, as an empty text, has nothing to learn and is left out.
    """

    def __init__(
        self,
        directory: Path,
        source: TextSource,
        build: Callable[[], Encoder],
        dtype: np.dtype,
        *,
        skip: bool,
        workers: int,
    ) -> None:
        self._arguments = (directory, source, build, dtype)
        self._settings = {"skip": skip, "workers": workers}
        self._directory, self._source, self._build, self._dtype = self._arguments
        self._skip, self._workers = skip, workers
        self._encoder: Encoder | None = None
        self._counts = os.open(directory / "counts", os.O_RDWR | os.O_CREAT, 0o666)
        self._claims = os.open(directory / "claims", os.O_RDWR | os.O_CREAT, 0o666)

    def __reduce__(self) -> tuple[Callable[[tuple, dict], "TokenCache"], tuple[tuple, dict]]:
        return _reopen, (self._arguments, self._settings)

    def counts(self, blocks: np.ndarray) -> np.ndarray:
        """Tokens of each block, -1 where it has to be made: (len,) integers to (len,) int64."""
        content = os.pread(self._counts, self._source.blocks * _RECORD.itemsize, 0)
        records = np.zeros(self._source.blocks, _RECORD)
        there = np.frombuffer(content[: len(content) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
        records[: there.size] = there
        records = records[blocks]
        known = records["check"] == _check(records["tokens"], records["left_out"], np.asarray(blocks))
        if not self._skip:
            known &= records["left_out"] == 0  # made again, they say which line it is
        return np.where(known, records["tokens"], -1).astype(np.int64)

    def fill(self, blocks: np.ndarray) -> np.ndarray:
        """Waits until all blocks are there, and makes those that nobody makes; returns their counts."""
        if self._workers and get_worker_info() is None:
            self._fill_by_workers(self._missing(blocks))
        while (missing := self._missing(blocks)).size:
            if not self._make_unclaimed(missing):
                time.sleep(_POLL)
        return self.counts(blocks)

    def go_ahead(self, blocks: np.ndarray) -> None:
        """Makes what is missing and nobody makes, where that keeps nobody from training."""
        if get_worker_info() is not None:
            self._make_unclaimed(self._missing(blocks))

    def tokens(self, blocks: np.ndarray) -> np.ndarray:
        """The tokens of all blocks, one after the other."""
        parts = self._read_all(blocks)
        damaged = [block for block, part in zip(blocks.tolist(), parts, strict=True) if part is None]
        if damaged:
            for block in damaged:
                self._record(block, bytes(_RECORD.itemsize))
            parts = self._read_all(blocks)
        if any(part is None for part in parts):
            fix = "what was just written there reads otherwise; name another directory"
            raise option_error("--data-cache-path", self._directory, fix)
        return np.concatenate(parts)

    def _missing(self, blocks: np.ndarray) -> np.ndarray:
        return blocks[self.counts(blocks) < 0]

    def _fill_by_workers(self, blocks: np.ndarray) -> None:
        if not blocks.size:
            return
        parts = np.array_split(blocks, min(blocks.size, self._workers * _PARTS))
        one_by_one = BatchSchedule(1, 1, 1)
        workers = min(self._workers, len(parts))
        filling = _Filling(self, parts)
        with MicroBatches(filling, one_by_one, rank=0, end=len(parts), num_workers=workers) as loader:
            for _ in loader:
                pass

    def _make_unclaimed(self, blocks: np.ndarray) -> int:
        made = 0
        for block in blocks.tolist():
            with self._claim(block) as mine:
                if mine and self._missing(np.array([block])).size:
                    self._make(block)
                    made += 1
        return made

    @contextlib.contextmanager
    def _claim(self, block: int) -> Iterator[bool]:
        """Whether the block is ours to make."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block)
        except (BlockingIOError, PermissionError):  # POSIX leaves the choice of the two
            yield False
            return
        except OSError:
            yield True  # a file system without locks
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, block)

    def _make(self, block: int) -> None:
        if self._encoder is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared out by processes already
            self._encoder = self._build()
        content = self._source.read(block)
        encoded = self._encoder(content)
        left_out = sum(encoded.problems.counts.values()) - encoded.problems.counts[NO_TOKENS]
        if left_out and not self._skip:
            problem = self._first_problem(content, encoded)
            where = self._source.place(block, problem.line)
            fix = "mend the line, or leave such lines out with --skip-bad-lines"
            raise ValueError(f"{where}: {problem.kind}: {problem.detail}; {fix}")
        tokens = np.ascontiguousarray(encoded.tokens[0], self._dtype).tobytes()
        path = self._path(block)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            write_durably(partial, _digest(tokens) + tokens)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            fix = f"{error.strerror}; name a directory with room in --data-cache-path"
            raise option_error("--data-cache-path", self._directory, fix) from None
        record = np.zeros(1, _RECORD)
        record["tokens"], record["left_out"] = encoded.tokens[0].size, left_out
        record["check"] = _check(record["tokens"], record["left_out"], np.array([block]))
        self._record(block, record.tobytes())

    def _first_problem(self, content: bytes, encoded: Encoded) -> Problem:
        """Of those that are no empty text: a block tells its first few problems alone, a line its own."""
        told = [problem for problem in encoded.problems.first if problem.kind != NO_TOKENS]
        if told:
            return told[0]
        for number, line in enumerate(split_lines(content), start=1):
            for problem in self._encoder(line).problems.first:
                if problem.kind != NO_TOKENS:
                    return Problem(number, problem.kind, problem.detail)
        raise AssertionError("a block counts problems that none of its lines has")

    def _record(self, block: int, record: bytes) -> None:
        os.pwrite(self._counts, record, block * _RECORD.itemsize)

    def _path(self, block: int) -> Path:
        return self._directory / f"{block // 1000:03}" / f"{block:07}"

    def _read_all(self, blocks: np.ndarray) -> list[np.ndarray | None]:
        counts = self.fill(blocks).tolist()
        return [self._read(block, count) for block, count in zip(blocks.tolist(), counts, strict=True)]

    def _read(self, block: int, count: int) -> np.ndarray | None:
        try:
            content = read_limited(self._path(block), _DIGEST + count * self._dtype.itemsize)
        except OSError:
            return None
        digest, tokens = content[:_DIGEST], content[_DIGEST:]
        if len(tokens) != count * self._dtype.itemsize or digest != _digest(tokens):
            return None
        return np.frombuffer(tokens, self._dtype)


class _Filling:
    """Parts of the blocks to fill as if they were samples, for a loader's workers."""

    def __init__(self, cache: TokenCache, parts: Sequence[np.ndarray]) -> None:
        self._cache, self._parts = cache, parts

    def batch(self, indices: np.ndarray) -> np.ndarray:
        self._cache.fill(self._parts[int(indices[0])])
        return np.zeros((1, 1), np.int64)


def _reopen(arguments: tuple, settings: dict) -> TokenCache:
    return TokenCache(*arguments, **settings)


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=_DIGEST).digest()


def _check(tokens: np.ndarray, left_out: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    return random_bits(tokens, left_out, blocks)
