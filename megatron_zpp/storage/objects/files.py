"""Data sets in an object store: small files are copied to this machine, and tokens are read by range.

A copy of s3://BUCKET/KEY is DIRECTORY/BUCKET/KEY, as Megatron-LM has it. KEY.copy.json beside it has the tag
of the object's content and the checksums of the copy. If either differs, the object is copied again.
"""

import functools
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import JSON_LIMIT, Checksums, DamagedFile, verify_file
from megatron_zpp.storage.files import locked, write_text
from megatron_zpp.storage.object_errors import NoObject, ObjectError
from megatron_zpp.storage.objects.path import ObjectPath, ObjectRanges
from megatron_zpp.storage.regular import read_limited

_REQUESTS = 16  # at once, per process
_PIECE = 8 << 20  # bytes of a request when a whole object is copied


class ObjectFile:
    """An object, with the interface of `OpenFile`; several ranges are read at once. Raises ObjectError."""

    def __init__(self, path: ObjectPath) -> None:
        self.path, self._ranges = str(path), path.status()
        self.size = self._ranges.size

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes [start, start + size). Raises DamagedFile if the object was replaced or removed,
        or if the store does not answer."""
        try:
            return self._ranges.read(start, size)
        except ObjectError as error:
            where = f"{self.path}: bytes {start} to {start + size}"
            raise DamagedFile(f"{where} cannot be read: {error.strerror}") from None

    def read_each(self, starts: list[int], sizes: list[int]) -> bytes:
        """Return the bytes [start, start + size) of each start, concatenated. Raises like `read`."""
        if len(starts) == 1:
            return self.read(starts[0], sizes[0])
        return b"".join(_requests(os.getpid()).map(self.read, starts, sizes))


def copied_prefix(prefix: ObjectPath, directory: Path) -> Path:
    """Return the prefix of copies of PREFIX.idx and of the small files beside it, as far as there are any.

    PREFIX.bin is not copied. Raises ObjectError, and OSError from the file system.
    """
    for ending in (".idx", ".checksums.json", ".tokenizer.json"):
        _copy(prefix.with_name(prefix.name + ending), directory)
    return directory / prefix.bucket / prefix.key


def _copy(path: ObjectPath, directory: Path) -> None:
    """Make the copy of an object equal to it; remove the copy if there is no object."""
    copy = directory / path.bucket / path.key
    try:
        opened = path.status()
    except NoObject:
        copy.unlink(missing_ok=True)
        return
    if _is_copy(copy, opened):  # all ranks of a node find that out at once, without the lock
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    with locked(copy.with_name(f"{copy.name}.lock")):  # one of them copies for all
        if not _is_copy(copy, opened):
            _download(opened, copy)


def _is_copy(copy: Path, opened: ObjectRanges) -> bool:
    record = _record(copy)
    try:
        found = json.loads(read_limited(record, JSON_LIMIT))
        verify_file(copy, Checksums.from_json(found["checksums"], record), _requests(os.getpid()).map)
        return found["tag"] == opened.tag
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _download(opened: ObjectRanges, copy: Path) -> None:
    partial = copy.with_name(f"{copy.name}.{secrets.token_hex(8)}.partial")
    writer = ChecksummedWriter(partial)
    try:
        for first in range(0, opened.size, _PIECE * _REQUESTS):
            starts = range(first, min(first + _PIECE * _REQUESTS, opened.size), _PIECE)
            sizes = [min(_PIECE, opened.size - start) for start in starts]
            for content in _requests(os.getpid()).map(opened.read, starts, sizes):
                writer.write(content)
        checksums = writer.finish()
        os.utime(partial, (opened.modified, opened.modified))  # the same on every machine
        os.replace(partial, copy)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    record = {"tag": opened.tag, "checksums": checksums.to_json()}
    write_text(_record(copy), json.dumps(record) + "\n")


def _record(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.copy.json")


@functools.lru_cache(maxsize=1)
def _requests(process: int) -> ThreadPoolExecutor:
    """Return the threads of this process that send requests; a forked worker has none of its parent's."""
    return ThreadPoolExecutor(_REQUESTS, thread_name_prefix="objects")
