"""A cache of the tokens of a text. Each block is tokenised by the process that needs it first.

    counts       per block: tokens, skipped lines, and a check of both; 0 before the block is tokenised
    claims       empty; the process that tokenises block n holds a lock on byte n
    000/0000012  the tokens of block 12, after their digest

A process that waits for blocks tokenises those that no other process has claimed. So the workers of all ranks
on all machines that share the directory tokenise every block once, in the order in which the run reads them.
The claims of a process end when it dies. On a file system without locks a block may be tokenised twice, to
the same bytes. Blocks that are damaged or missing are tokenised again.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch.utils.data import get_worker_info

from megatron_zpp.config.options import option_error
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.corpus.encode import NO_TOKENS, Encoder
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.stateless_random import random_bits
from megatron_zpp.data.text.sources import TextSource
from megatron_zpp.storage.files import open_shared, write_durably
from megatron_zpp.storage.regular import read_limited
from megatron_zpp.storage.waits import attempt_wait, growing_waits

_RECORD = np.dtype([("tokens", "<u8"), ("skipped", "<u8"), ("check", "<u8")])
_DIGEST = 16  # bytes
_POLL = 0.02  # seconds until the second look for blocks that other processes tokenise
_PARTS = 16  # parts per worker, so that fast workers can take more


class TokenCache:
    """The tokens of the blocks of `source`, in the existing `directory`.

    `build` creates the encoder in the process that tokenises. With `workers` above 0 that is a worker of a
    loader, never the process that trains. A line without a document raises ValueError unless `skip` is set; a
    document without tokens, such as an empty text, is always skipped.
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
        self._directory, self.source, self._build, self._dtype = directory, source, build, dtype
        self._skip, self._workers = skip, workers
        self._encoder: Encoder | None = None
        self._counts, self._claims = open_shared(directory / "counts"), open_shared(directory / "claims")

    def __reduce__(self) -> tuple[Callable[[], "TokenCache"], tuple[()]]:
        arguments = (self._directory, self.source, self._build, self._dtype)
        return partial(TokenCache, *arguments, skip=self._skip, workers=self._workers), ()

    def counts(self, blocks: np.ndarray) -> np.ndarray:
        """Return the tokens of each block, -1 if it is not tokenised: (len,) integers to (len,) int64."""
        records = self._records(np.asarray(blocks))
        known = records["check"] == random_bits(records["tokens"], records["skipped"], np.asarray(blocks))
        if not self._skip:
            known &= records["skipped"] == 0  # tokenised again, so that the error names the line
        return np.where(known, records["tokens"], -1).astype(np.int64)

    def skipped(self, blocks: np.ndarray) -> int:
        """Return the lines that were skipped in those of the blocks that are tokenised."""
        return int(self._records(blocks[self.counts(blocks) >= 0])["skipped"].sum())

    def _records(self, blocks: np.ndarray) -> np.ndarray:
        """Return the records of blocks, zeros where the file has none yet."""
        size = _RECORD.itemsize
        parts = (os.pread(self._counts, size, block * size).ljust(size, b"\0") for block in blocks.tolist())
        return np.frombuffer(b"".join(parts), _RECORD)

    def fill(self, blocks: np.ndarray) -> np.ndarray:
        """Tokenise unclaimed blocks, wait for the others, and return `counts`."""
        if self._workers and get_worker_info() is None:
            self._fill_by_workers(self._missing(blocks))
        waits, claim_at = growing_waits(_POLL), -math.inf
        # Read once: another process may find a block damaged, and remove its count, at any time.
        while ((counts := self.counts(blocks)) < 0).any():
            # What is claimed stays so unless its process dies. A server of locks is slower than one of bytes.
            if time.monotonic() >= claim_at:
                done = self._tokenise_unclaimed(blocks[counts < 0])
                claim_at = time.monotonic() + attempt_wait()
                if done:
                    waits = growing_waits(_POLL)
                    continue
            time.sleep(next(waits))
        return counts

    def prefetch(self, blocks: np.ndarray) -> None:
        """In a worker, tokenise blocks that no process has claimed; the process that trains does nothing."""
        if get_worker_info() is not None:
            self._tokenise_unclaimed(self._missing(blocks))

    def tokens(self, blocks: np.ndarray) -> np.ndarray:
        numbers = blocks.tolist()
        for _ in range(2):
            counts = self.fill(blocks).tolist()
            parts = [self._read(block, count) for block, count in zip(numbers, counts, strict=True)]
            kept = [part for part in parts if part is not None]
            if len(kept) == len(parts):
                return np.concatenate(kept)
            for block, part in zip(numbers, parts, strict=True):
                if part is None:  # damaged: tokenised again
                    self._record(block, bytes(_RECORD.itemsize))
        fix = "returns other bytes than were just written; name another directory"
        raise option_error("--data-cache-path", self._directory, fix)

    def _missing(self, blocks: np.ndarray) -> np.ndarray:
        return blocks[self.counts(blocks) < 0]

    def _fill_by_workers(self, blocks: np.ndarray) -> None:
        if not blocks.size:
            return
        parts = np.array_split(blocks, min(blocks.size, self._workers * _PARTS))
        one_part_each = BatchSchedule(1, 1, 1)
        workers = min(self._workers, len(parts))
        source = _PartsToFill(self, parts)
        with MicroBatches(source, one_part_each, rank=0, end=len(parts), num_workers=workers) as loader:
            for _ in loader:
                pass

    def _tokenise_unclaimed(self, blocks: np.ndarray) -> int:
        """Return how many of the blocks this process has tokenised."""
        done = 0
        for block in blocks.tolist():
            with self._claim(block) as mine:
                if mine and self._missing(np.array([block])).size:
                    self._tokenise(block)
                    done += 1
        return done

    @contextlib.contextmanager
    def _claim(self, block: int) -> Iterator[bool]:
        """Claim a block for the time of the context; yields whether this process may tokenise it."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block)
        except (BlockingIOError, PermissionError):  # POSIX allows either error
            yield False
            return
        except OSError:
            yield True  # a file system without locks
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, block)

    def _tokenise(self, block: int) -> None:
        if self._encoder is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use all cores already
            self._encoder = self._build()
        encoded = self._encoder(self.source.read(block))
        skipped = [problem for problem in encoded.problems if problem.kind != NO_TOKENS]
        if skipped and not self._skip:
            problem = skipped[0]
            where = self.source.location(block, problem.line)
            fix = "correct the line, or skip such lines with --skip-bad-lines"
            raise ValueError(f"{where}: {problem.kind}: {problem.detail}; {fix}")
        tokens = np.ascontiguousarray(encoded.tokens[0], self._dtype).tobytes()
        self._write(self._path(block), _digest(tokens) + tokens)
        record = np.zeros(1, _RECORD)
        record["tokens"], record["skipped"] = encoded.tokens[0].size, len(skipped)
        record["check"] = random_bits(record["tokens"], record["skipped"], np.array([block]))
        self._record(block, record.tobytes())

    def _write(self, path: Path, content: bytes) -> None:
        # Without locks between hosts, two processes of one number may tokenise this block.
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        try:
            path.parent.mkdir(exist_ok=True)
            write_durably(unfinished, content)
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise self._unwritable(error) from None

    def _record(self, block: int, record: bytes) -> None:
        try:
            os.pwrite(self._counts, record, block * _RECORD.itemsize)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ValueError:
        fix = f"{error.strerror}; name a directory with free space in --data-cache-path"
        if isinstance(error, FileNotFoundError):
            fix = "was removed during the run; start the run again"
        return option_error("--data-cache-path", self._directory, fix)

    def _path(self, block: int) -> Path:
        return self._directory / f"{block // 1000:03}" / f"{block:07}"

    def _read(self, block: int, count: int) -> np.ndarray | None:
        try:
            content = read_limited(self._path(block), _DIGEST + count * self._dtype.itemsize)
        except OSError:
            return None
        digest, tokens = content[:_DIGEST], content[_DIGEST:]
        if len(tokens) != count * self._dtype.itemsize or digest != _digest(tokens):
            return None
        return np.frombuffer(tokens, self._dtype)


@dataclass(frozen=True)
class _PartsToFill:
    """A source of batches that fills one part of the blocks per batch, for the workers of a loader."""

    cache: TokenCache
    parts: Sequence[np.ndarray]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        self.cache.fill(self.parts[int(indices[0])])
        return np.zeros((1, 1), np.int64)


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=_DIGEST).digest()
