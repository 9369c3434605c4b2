"""Writes a file at the disk's rate, with checksums of the bytes in memory."""

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megatron_zpp.storage.checksums import CHUNK_BYTES, Checksums, OnProgress, no_report, thread_count
from megatron_zpp.storage.files import open_new

_PIECE_BYTES = 256 << 10  # of a chunk; the processor's cache holds it between the digest and the write
_START_BYTES = 16 << 20  # given to the disk at once
_FLUSH_BYTES = 1 << 30  # written between two flushes; at most twice as much is not on disk


class ChecksummedWriter:
    """Writes a file and computes its checksums from the bytes in memory, not from what the disk returns.

    Threads take a chunk each: they compute its digest and write it, piece by piece. Meanwhile the disk
    writes the chunks before theirs. Twice as many chunks as threads are in memory besides the caller's.
    Another thread flushes to disk after every GiB, so that `finish`, which makes the file durable, does not
    wait long.
    """

    def __init__(
        self, path: Path, chunk_bytes: int = CHUNK_BYTES, *, on_progress: OnProgress = no_report
    ) -> None:
        self._file, self._on_progress = os.fdopen(open_new(path), "wb", buffering=0), on_progress
        self._flusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._flushing: Future[None] | None = None
        self._chunk_bytes = chunk_bytes
        self._chunk = bytearray()  # bytes that do not fill a chunk yet
        self._digests: list[str] = []
        self._on_their_way: deque[Future[str]] = deque()  # the digests of the chunks after these
        self._size = self._written = 0  # bytes of all chunks, and of those that have a digest
        self._started = self._flushed = 0  # bytes that the disk was told to write, and those of a flush
        self._most = 2 * thread_count()
        self._writers = ThreadPoolExecutor(thread_count(), thread_name_prefix="checksummed write")

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, which the caller may change afterwards. Raises OSError from the file system."""
        data = memoryview(data).cast("B")
        borrows = len(data) >= self._chunk_bytes
        while len(data):
            part = data[: self._chunk_bytes - len(self._chunk)]
            data = data[len(part) :]
            if len(part) == self._chunk_bytes:
                self._put(part)  # no copy
                continue
            self._chunk += part
            if len(self._chunk) == self._chunk_bytes:
                self._put_rest()
        if borrows:
            self._collect(0)

    def finish(self) -> Checksums:
        """Write the rest, wait until all of it is on disk, and return the checksums. Raises OSError."""
        self._put_rest()
        self._collect(0)
        if self._flushing is not None:
            self._flushing.result()
            self._on_progress()
        os.fsync(self._file.fileno())
        self.close()
        return Checksums(self._size, self._chunk_bytes, tuple(self._digests))

    def close(self) -> None:
        """Close the file and end the threads, whether or not the file is complete."""
        self._writers.shutdown(cancel_futures=True)
        self._flusher.shutdown()
        self._file.close()

    def _put_rest(self) -> None:
        if self._chunk:
            self._put(memoryview(self._chunk))
            self._chunk = bytearray()

    def _put(self, chunk: memoryview) -> None:
        self._on_their_way.append(
            self._writers.submit(write_and_digest, self._file.fileno(), self._size, chunk)
        )
        self._size += len(chunk)
        self._collect(self._most)

    def _collect(self, most: int) -> None:
        """Wait until at most `most` chunks are on their way to the file."""
        while len(self._on_their_way) > most:
            self._digests.append(self._on_their_way.popleft().result())
            self._written = min(len(self._digests) * self._chunk_bytes, self._size)
            self._on_progress()
            self._have_disk_write()

    def _have_disk_write(self) -> None:
        """Start the disk on what is in the page cache, and flush now and then."""
        file = self._file.fileno()
        if self._written - self._started >= _START_BYTES:
            # Linux begins to write a range that will not be read soon. Elsewhere the flush does it, later.
            length = self._written - self._started
            os.posix_fadvise(file, self._started, length, os.POSIX_FADV_DONTNEED)
            self._started = self._written
        if self._written - self._flushed >= _FLUSH_BYTES:
            if self._flushing is not None:
                self._flushing.result()
            self._flushing = self._flusher.submit(os.fdatasync, file)
            self._flushed = self._written


def write_and_digest(file: int, first: int, chunk: memoryview) -> str:
    """Write a chunk at offset `first`, and return its digest. Raises OSError."""
    digest = hashlib.sha256()
    for begin in range(0, len(chunk), _PIECE_BYTES):
        piece = chunk[begin : begin + _PIECE_BYTES]
        digest.update(piece)
        done = 0
        while done < len(piece):  # a write may be partial
            done += os.pwrite(file, piece[done:], first + begin + done)
    return digest.hexdigest()
