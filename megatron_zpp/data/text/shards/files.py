"""The files of a text in shards, local or remote, and what distinguishes one from its later versions."""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.data.samples import ShardRecord
from megatron_zpp.data.text.sources import check_unchanged
from megatron_zpp.storage.regular import open_stream

THREADS = 16  # files that are examined at a time: each is a few short requests
_HEAD, _TAIL = 4 << 10, 16 << 10  # bytes that are part of a digest; a Parquet file ends in its index
_PROBES, _PROBE_BYTES = 8, 512
_REVISION = re.compile(r"^(hf://[^@]*)@[^/]*/")
_IDENTIFIERS = ("blob_id", "ETag", "etag", "checksum", "sha256", "created")  # of versions, by file system


@dataclass(frozen=True)
class ShardFile:
    """A local file, or a remote one that `path`, a URL of fsspec, names."""

    path: str
    size: int
    contents: str
    modified: int

    @property
    def remote(self) -> bool:
        """Whether every read of the file is a request over a network."""
        return "://" in self.path

    def record(self) -> ShardRecord:
        name = _REVISION.sub(r"\1/", self.path) if self.remote else os.path.abspath(self.path)
        return ShardRecord(name, self.contents, self.modified)

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises ValueError if it was changed or removed during the run."""
        if self.remote:
            from fsspec.core import url_to_fs

            files, path = url_to_fs(self.path)
            return files.open(path, "rb")
        self.check()
        return open_stream(self.path)

    def check(self) -> None:
        """Raise ValueError if a local file was changed or removed during the run."""
        if not self.remote:
            fix = "the shard was there when the run began: restore it"
            check_unchanged(self.path, self.path, (self.size, self.modified), fix)


class Shard(ABC):
    """A file that is cut into pieces. Picklable.

    Some files can only be read forward, item by item: pieces or rows. Such a file stays open between reads,
    and the next read continues after the last item.
    """

    file: ShardFile
    pieces: int
    entries: Sequence[int]  # pieces at which reading can begin; others are read after the pieces before
    _items: Generator[bytes, None, None] | None = None  # from number `_next` on; holds the file open
    _next = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_items": None, "_next": 0}

    @abstractmethod
    def read(self, piece: int) -> bytes:
        """Return the documents of a piece as JSON lines. Raises ValueError if the file is damaged."""

    @abstractmethod
    def location(self, piece: int, line: int) -> str:
        """Return the location of a line of a piece, counted from 1."""

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._items is not None:
            self._items.close()
        self._items, self._next = None, 0

    def _begin(self, items: Generator[bytes, None, None], first: int) -> None:
        """Read from `items` from now on, which begin at number `first`."""
        self.close()
        self._items, self._next = items, first

    def _take(self, first: int, last: int) -> list[bytes]:
        """Return the items [first, last); those before are read, and not kept."""
        items, self._items = self._items, None  # an error ends the iterator, which then is not used again
        assert items is not None, f"{self.file.path}: nothing has begun"
        for _ in range(self._next, first):
            next(items)
        found = [next(items) for _ in range(first, last)]
        self._items, self._next = items, last
        return found


def examine_files(flag: str, paths: Sequence[str]) -> list[ShardFile]:
    """Return the files of all paths. Raises ValueError for one that cannot be read."""

    def examine(path: str) -> ShardFile:
        try:
            return _examine_remote(path) if "://" in path else _examine_local(path)
        except OSError as error:
            raise option_error(flag, path, f"{one_line(error)}; name files that can be read") from None

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(examine, paths))


def _examine_local(path: str) -> ShardFile:
    with open_stream(path, buffering=0) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        size = status.st_size
        probes = [(size * probe // _PROBES, _PROBE_BYTES) for probe in range(1, _PROBES)]
        parts = [(0, _HEAD), *probes, (max(0, size - _TAIL), _TAIL)]
        digest = hashlib.sha256(str(size).encode())
        for offset, count in parts:
            digest.update(os.pread(descriptor, count, offset))
    return ShardFile(path, size, digest.hexdigest()[:32], status.st_mtime_ns)


def _examine_remote(url: str) -> ShardFile:
    from fsspec.core import url_to_fs

    files, path = url_to_fs(url)
    # Without commits, the hub answers for a whole directory at a time.
    info: Mapping[str, Any] = files.info(path, **({"expand_info": False} if url.startswith("hf:") else {}))
    version = {key: str(info[key]) for key in _IDENTIFIERS if info.get(key)}
    text = json.dumps({"size": info["size"], **version}, sort_keys=True)
    return ShardFile(url, int(info["size"]), hashlib.sha256(text.encode()).hexdigest()[:32], 0)
