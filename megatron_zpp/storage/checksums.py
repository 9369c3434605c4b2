"""Checksums of a file per chunk, so that errors have an offset and a range is checked as it is read.

All chunks but the last have the same size. A chunk's digest is its SHA-256. In JSON:

    {"bytes": 9437184, "chunk_bytes": 4194304, "sha256": ["9f86d0…", "60303a…", "fd61a0…"]}
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.storage.location import Location
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.regular import (
    Ranges,
    open_ranges,
    open_stream,
    read_again_after_error,
    says_what_is_there,
)

CHUNK_BYTES = 4 << 20  # of all files that this program writes
# Accepted chunk sizes: a chunk is held in memory, and each chunk costs a read and a digest.
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 64 << 20
# Bytes of a JSON file of checksums: 64 digits and up to 8 characters around them per chunk of 16 TiB.
JSON_LIMIT = 72 * ((16 << 40) // CHUNK_BYTES)
_HEX = 64  # characters of a SHA-256
Runner = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]  # map, or a thread pool's map
OnProgress = Callable[[], None]  # called after every chunk, by the thread that read or wrote it
_MOST_THREADS = 4  # beyond that, one rank of a node would take cores from the others


def thread_count() -> int:
    """Threads that read and hash chunks side by side, which Python's lock does not prevent; at least two.

    One of two reads while the other hashes, even on a single core.
    """
    return max(2, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def no_report() -> None:
    """Report progress to nobody."""


class DamagedFile(ValueError):
    """A file differs from what was written. The message says which file, where and how."""


@dataclass(frozen=True)
class Checksums:
    """Size and chunk digests of one file; the last chunk may be short."""

    size: int
    chunk_bytes: int
    digests: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value described in the module's docstring."""
        return {"bytes": self.size, "chunk_bytes": self.chunk_bytes, "sha256": list(self.digests)}

    @classmethod
    def from_json(cls, value: Any, path: Location) -> "Checksums":
        """Return the inverse of `to_json`. Raises DamagedFile naming `path`, the source of the value."""
        try:
            found = cls(value["bytes"], value["chunk_bytes"], tuple(value["sha256"]))
            fits = (
                type(found.size) is int
                and type(found.chunk_bytes) is int
                and found.size >= 0
                and found.chunk_bytes > 0
                and len(found.digests) == -(-found.size // found.chunk_bytes)
                and all(isinstance(digest, str) and len(digest) == _HEX for digest in found.digests)
            )
        except (KeyError, TypeError) as error:
            raise DamagedFile(f"{path}: not valid checksums of a file ({error!r})") from None
        if not fits:
            raise DamagedFile(f"{path}: not valid checksums of a file")
        check_chunk_bytes(found.chunk_bytes, path)
        return found


def check_chunk_bytes(chunk_bytes: int, path: Location) -> None:
    """Raise DamagedFile naming `path`, the source of the value, for chunks of a size that nobody writes."""
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        limits = f"from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise DamagedFile(f"{path}: chunk_bytes {chunk_bytes}; must be {limits}")


class RecentChunks:
    """The newest chunks of which a reader needed a part, because its next read may need the rest.

    At most `most`, by file and number, in memory that does not change. Thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._chunks: OrderedDict[tuple[Location, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Location, index: int) -> memoryview | None:
        """Return chunk `index` of the file `path`, if it is here."""
        with self._lock:
            return self._chunks.get((path, index))

    def put(self, path: Location, index: int, chunk: memoryview) -> None:
        """Keep a verified chunk, and forget the oldest ones."""
        with self._lock:
            self._chunks[path, index] = chunk
            while len(self._chunks) > self._most:
                self._chunks.popitem(last=False)


class VerifiedFile:
    """Reads ranges of a file with known checksums, and verifies every chunk that it reads. Thread-safe.

    A chunk that cannot be read, or has another digest, is read once more from the file opened anew: networks
    and memory fail for a moment. Chunks that are read in part are kept in `recent`, which files may share.

    The constructor raises DamagedFile if the file is missing, is not a regular file, or has another size.
    The file may be an object; requests that fail raise ObjectError. Every method that reads raises
    DamagedFile, and OSError, which names the file, for an error of the file system that persists.
    """

    def __init__(
        self,
        path: Location,
        checksums: Checksums,
        on_progress: OnProgress = no_report,
        recent: RecentChunks | None = None,
    ) -> None:
        self.path, self._checksums, self._on_progress = path, checksums, on_progress
        self._recent = recent or RecentChunks(2)  # those at both ends of a read
        self._file = self._open()
        self._checked = bytearray(len(checksums.digests))

    def read_into(self, start: int, target: memoryview, run: Runner = map) -> None:
        """Fill `target` with the bytes of the file from `start`; `run` may be the map of a thread pool."""
        stop, size = start + len(target), self._checksums.chunk_bytes
        if stop > self._checksums.size:
            raise DamagedFile(f"{self.path}: {self._checksums.size} bytes; {stop} are needed")

        def read(index: int) -> None:
            first = index * size
            chunk = range(first, min(first + size, self._checksums.size))
            begin, end = max(start, chunk.start), min(stop, chunk.stop)
            part = target[begin - start : end - start]
            if len(part) == len(chunk):
                self._load(index, part)
                return
            whole = self._recent.get(self.path, index)
            if whole is None:
                whole = memoryview(bytearray(len(chunk)))
                self._load(index, whole)
                self._recent.put(self.path, index, whole)
            part[:] = whole[begin - first : end - first]

        chunks = range(start // size, -(-stop // size))
        if start < stop:
            list((run if len(chunks) > 1 else map)(read, chunks))  # a thread would only add its turn

    def check(self, chunks: Iterable[int], run: Runner = map) -> None:
        """Read and verify chunks by number. Each thread of `run` needs memory for one chunk."""
        size = self._checksums.chunk_bytes
        spare: list[memoryview] = []  # fresh memory for every chunk would have to be mapped page by page

        def check(index: int) -> None:
            try:
                buffer = spare.pop()
            except IndexError:
                buffer = memoryview(bytearray(size))
            self._load(index, buffer[: self._checksums.size - index * size])
            spare.append(buffer)

        list(run(check, chunks))

    def check_rest(self, run: Runner = map) -> None:
        """Read and verify the chunks that no call has read yet."""
        self.check([index for index, done in enumerate(self._checked) if not done], run)

    def close(self) -> None:
        self._file.close()

    def _open(self) -> Ranges:
        try:
            file = read_again_after_error(self.path, lambda: open_ranges(self.path))
        except FileNotFoundError:
            raise DamagedFile(f"{self.path}: missing") from None
        except OSError as error:
            if not says_what_is_there(error):
                raise
            raise DamagedFile(f"{self.path}: {error.strerror}") from None
        if file.size != self._checksums.size:
            file.close()
            raise DamagedFile(f"{self.path}: {file.size} bytes; {self._checksums.size} were written")
        return file

    def _load(self, index: int, target: memoryview) -> None:
        try:
            self._load_from(self._file, index, target)
        except ObjectError:
            raise  # the request was repeated already
        except (DamagedFile, OSError):
            with closing(self._open()) as file:  # not in place of the other one, which threads are reading
                file.forget(index * self._checksums.chunk_bytes, len(target))
                self._load_from(file, index, target)
        self._checked[index] = 1
        self._on_progress()

    def _load_from(self, file: Ranges, index: int, target: memoryview) -> None:
        first, done = index * self._checksums.chunk_bytes, 0
        while done < len(target):  # a read may be partial
            count = file.read_into(first + done, target[done:])
            if count == 0:
                raise DamagedFile(f"{self.path}: became shorter while it was read")
            done += count
        if digest_of(target) != self._checksums.digests[index]:
            where = f"{self.path}: damaged between bytes {first} and {first + len(target)}"
            raise DamagedFile(f"{where}: its SHA-256 is not the one that was written")


def checksums_of(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Checksums:
    """Return the checksums of a file's present content. Raises OSError from the file system."""
    digests, size = [], 0
    with open_stream(path) as file:
        while chunk := file.read(chunk_bytes):
            digests.append(digest_of(chunk))
            size += len(chunk)
    return Checksums(size, chunk_bytes, tuple(digests))


def checksums_of_bytes(content: bytes | bytearray) -> Checksums:
    view = memoryview(content)
    digests = [digest_of(view[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES)]
    return Checksums(len(content), CHUNK_BYTES, tuple(digests))


def verify_file(
    path: Location, checksums: Checksums, run: Runner = map, on_progress: OnProgress = no_report
) -> None:
    """Raise DamagedFile, with the offset, unless the file has these checksums; `run` as of VerifiedFile."""
    with closing(VerifiedFile(path, checksums, on_progress)) as file:
        file.check_rest(run)


def digest_of(chunk: bytes | memoryview) -> str:
    return hashlib.sha256(chunk).hexdigest()
