"""Reads indexed data sets, PREFIX.bin and PREFIX.idx, in Megatron-LM's format.

Both files are little-endian. PREFIX.bin holds the concatenated tokens. PREFIX.idx locates each sequence:

    byte      field
    0         9 bytes `MMIDIDX\\0\\0`
    9         uint64 version, 1
    17        uint8  dtype code of the tokens
    18        uint64 S, the number of sequences
    26        uint64 D, the number of documents + 1
    34        int32  lengths[S], in tokens
    34 + 4S   int64  pointers[S], the byte of PREFIX.bin at which each sequence begins
    34 + 12S  int64  document_indices[D], the first sequence of each document, then S
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_zpp.data.checksums import changed_since_written, read_checksums
from megatron_zpp.data.file_array import AnyFile, FileArray, OpenFile
from megatron_zpp.data.samples import Source
from megatron_zpp.storage.checksums import (
    DamagedFile,
    OnProgress,
    VerifiedFile,
    no_report,
    thread_count,
    verify_file,
)
from megatron_zpp.storage.location import location
from megatron_zpp.storage.regular import UnfitFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D
DTYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

_CHUNK = 1 << 20  # entries of an index checked at a time, in constant memory
_FINGERPRINTED = 1 << 14  # sequences at either end whose lengths are part of the fingerprint
Rows: TypeAlias = np.ndarray | FileArray
_FINGERPRINTED_BYTES = 64 << 10  # of PREFIX.bin, at either end


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which tokens are stored: uint16 for fewer than 65,500 ids, otherwise int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def index_path(prefix: str) -> str:
    return prefix + ".idx"


def tokens_path(prefix: str) -> str:
    return prefix + ".bin"


class NoDataset(ValueError):
    """Neither file of a data set exists."""


class IndexedDataset(Source):
    """A data set on disk, whose files stay open and are read when an array is indexed (file_array.py).

    The constructor checks that the index is consistent with itself, with the size of PREFIX.bin and with
    PREFIX.checksums.json, if that exists. `prefix` may also be the name of either file. Pickling stores the
    arguments only: a worker process opens the files again.

    `prefix` may be s3://BUCKET/PREFIX. Then the index is a copy in the directory `cache`, and tokens are read
    from the object store by range.

    prefix             as given, without a suffix
    local              prefix of the index on this machine
    lengths            (S,) int32, tokens of each sequence
    pointers           (S,) int64, byte of PREFIX.bin at which each sequence begins
    document_indices   (D,) int64, first sequence of each document, then S
    tokens             (T,) dtype, the whole of PREFIX.bin
    checksums          of both files as they were written, or None

    Raises ValueError, one line with the file, the byte offset, what was found and what was expected, if a
    file is missing or anything in it does not fit, and if there are no tokens. Reading an array raises
    DamagedFile, a ValueError, if its file has become shorter since.
    """

    def __init__(self, prefix: str | Path, cache: str | None = None) -> None:
        self.name = self.prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
        self.local, self._cache = self.prefix, cache
        if not isinstance(stored := location(self.prefix), Path):
            assert cache is not None, "DataConfig.check requires a directory for data in an object store"
            from megatron_zpp.storage.objects.files import copied_prefix

            self.local = str(copied_prefix(stored, Path(cache)))
        path = index_path(self.local)
        file = _open(path, index_path(self.prefix))
        self.checksums = read_checksums(self.local)
        if self.checksums is not None:
            try:
                verify_file(Path(path), self.checksums.index)
            except DamagedFile as damage:
                raise changed_since_written(self.prefix, damage) from None
        self.dtype, sequences, documents = _read_header(file)
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        expected = documents_at + 8 * documents
        _check_size(file, expected, f"{sequences} sequences and {documents} document indices")
        self.lengths = FileArray(file, "<i4", lengths_at, (sequences,))
        self.pointers = FileArray(file, "<i8", pointers_at, (sequences,))
        self.document_indices = FileArray(file, "<i8", documents_at, (documents,))
        # A sequence ends where the next one begins. The entry after the last pointer is the first document
        # index.
        self._bounds = FileArray(file, "<i8", pointers_at, (sequences + 1,))
        self.num_tokens = check_lengths_and_pointers(path, self.lengths, self.pointers, self.dtype.itemsize)
        check_document_indices(path, self.document_indices, sequences)
        self.tokens = self._open_tokens()

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.lengths.size

    @property
    def num_documents(self) -> int:
        """D - 1."""
        return self.document_indices.size - 1

    def token_ranges(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return first token and end of each sequence: (len,) integers to two arrays (len,) int64."""
        bounds = self._bounds.gather(sequences, np.full(len(sequences), 2))
        both = bounds.reshape(-1, 2) // self.dtype.itemsize
        ends = np.where(sequences == self.num_sequences - 1, self.num_tokens, both[:, 1])
        return both[:, 0], ends

    def fingerprint(self) -> str:
        """SHA-256 of dtype, both counts, and lengths and tokens at both ends.

        It is the same with and without PREFIX.checksums.json, which may be added or lost between two runs.
        """
        digest = self._digest_of_lengths()
        ends = _FINGERPRINTED_BYTES // self.dtype.itemsize
        digest.update(self.tokens[:ends].tobytes())
        digest.update(self.tokens[-ends:].tobytes())
        return digest.hexdigest()[:32]

    def older_fingerprints(self) -> tuple[str, ...]:
        """The identifier in checkpoints of earlier versions, which did not depend on the tokens."""
        return (self._digest_of_lengths().hexdigest()[:32],)

    def _digest_of_lengths(self) -> Any:
        digest = hashlib.sha256(f"{self.num_sequences} {self.num_tokens} {self.dtype}".encode())
        digest.update(self.lengths[:_FINGERPRINTED].tobytes())
        digest.update(self.lengths[-_FINGERPRINTED:].tobytes())
        return digest

    def read(self, starts: np.ndarray, lengths: np.ndarray, vocab_size: int) -> np.ndarray:
        """Return the tokens [start, start + length) of each start, concatenated, int64.

        Raises ValueError for one outside [0, vocab_size).
        """
        found = self.tokens.gather(starts, lengths).astype(np.int64)
        if found.size and (found.min() < 0 or found.max() >= vocab_size):
            wrong = int(np.argmax((found < 0) | (found >= vocab_size)))
            piece = int(np.searchsorted(np.cumsum(lengths), wrong, side="right"))
            at = int(starts[piece] + wrong - lengths[:piece].sum())
            raise ValueError(
                f"{tokens_path(self.prefix)}: byte {at * self.dtype.itemsize}: token {at} is {found[wrong]}, "
                f"outside the vocabulary of {vocab_size}; use the tokenizer that made the data set"
            )
        return found

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str, str | None]]:
        return IndexedDataset, (self.prefix, self._cache)

    def _open_tokens(self) -> FileArray:
        path = tokens_path(self.prefix)
        file, expected = _open(path, path), self.num_tokens * self.dtype.itemsize
        tokens = f"the {self.num_tokens} {self.dtype.name} tokens of {index_path(self.prefix)}"
        _check_size(file, expected, tokens)
        if not self.num_tokens:
            raise ValueError(f"{path}: 0 tokens; a data set needs at least one")
        return FileArray(file, self.dtype, 0, (self.num_tokens,))


def _check_size(file: AnyFile, expected: int, contents: str) -> None:
    found = file.size
    if found != expected:
        what = "truncated" if found < expected else "longer than it should be"
        where = f"{what} at byte {min(found, expected)}: {found} bytes found"
        raise ValueError(f"{file.path}: {where}, {expected} needed for {contents}")


def _read_header(file: AnyFile) -> tuple[np.dtype, int, int]:
    """Return the dtype of the tokens, S and D."""
    path, size = file.path, file.size
    start = file.read(0, min(size, HEADER.size))
    if start[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path}: byte 0: found {start[: len(MAGIC)]!r}; an index begins with {MAGIC!r}")
    if size < HEADER.size:
        raise ValueError(f"{path}: truncated at byte {size}: the header alone is {HEADER.size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(start)
    if version != VERSION:
        raise ValueError(f"{path}: byte 9: version {version}; only version {VERSION} is supported")
    if code not in DTYPE_CODES or np.dtype(DTYPE_CODES[code]).kind == "f":
        integers = "1 uint8, 2 int8, 3 int16, 4 int32, 5 int64 or 8 uint16"
        raise ValueError(f"{path}: byte 17: dtype code {code} is not an integer type: {integers}")
    return np.dtype(DTYPE_CODES[code]), sequences, documents


def _open(path: str, shown: str) -> AnyFile:
    """Open a file or object, which an error calls `shown`."""
    stored = location(path)
    file: AnyFile
    try:
        if isinstance(stored, Path):
            file = OpenFile(stored)
        else:
            from megatron_zpp.storage.objects.files import ObjectFile

            file = ObjectFile(stored)
    except FileNotFoundError:
        prefix = shown[: -len(".idx")]
        files = tokens_path(prefix), index_path(prefix)
        what = f"{shown}: no such file; the data set {prefix} consists of {files[0]} and {files[1]}"
        raise (ValueError if any(map(os.path.lexists, files)) else NoDataset)(what) from None
    except UnfitFile as error:
        raise ValueError(f"{shown}: {error.strerror}") from None
    if not file.size:
        raise ValueError(f"{shown}: the file is empty (0 bytes)")
    return file


def check_lengths_and_pointers(path: str, lengths: Rows, pointers: Rows, itemsize: int) -> int:
    """Return the number of tokens, from lengths (S,) int32 and pointers (S,) int64 of the index `path`.

    Raises ValueError for a negative length, and for a pointer that differs from the size of all sequences
    before it.
    """
    lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * lengths.size
    position = 0  # bytes of .bin
    for first in range(0, lengths.size, _CHUNK):
        chunk = lengths[first : first + _CHUNK].astype(np.int64)
        if chunk.min() < 0:
            at = int(np.argmax(chunk < 0))
            where = f"{path}: byte {lengths_at + 4 * (first + at)}: sequence {first + at}"
            raise ValueError(f"{where} has length {chunk[at]}; lengths must be 0 or more")
        ends = position + np.cumsum(chunk) * itemsize
        expected = ends - chunk * itemsize
        found = pointers[first : first + _CHUNK]
        if not np.array_equal(found, expected):
            at = int(np.argmax(found != expected))
            raise ValueError(
                f"{path}: byte {pointers_at + 8 * (first + at)}: sequence {first + at} points at byte "
                f"{found[at]} of the .bin; the lengths before it end at byte {expected[at]}"
            )
        position = int(ends[-1])
    return position // itemsize


def check_document_indices(path: str, indices: Rows, sequences: int) -> None:
    """Raise ValueError unless document indices (D,) int64 rise from 0 to `sequences`, the number S."""
    indices_at = HEADER.size + 12 * sequences
    if not indices.size:
        raise ValueError(f"{path}: byte 26: 0 document indices; the first one, 0, is missing")
    if indices[0] != 0:
        raise ValueError(f"{path}: byte {indices_at}: document 0 begins at sequence {indices[0]}, not 0")
    for first in range(0, indices.size - 1, _CHUNK):
        chunk = indices[first : first + _CHUNK + 1]
        falls = chunk[1:] < chunk[:-1]
        if falls.any():
            at = first + int(np.argmax(falls)) + 1
            where = f"{path}: byte {indices_at + 8 * at}: document index {at}"
            raise ValueError(f"{where} is {indices[at]}, below the {indices[at - 1]} before it")
    if indices[-1] != sequences:
        at = indices_at + 8 * (indices.size - 1)
        raise ValueError(
            f"{path}: byte {at}: the last document ends at sequence {indices[-1]}; there are {sequences}"
        )


def verify_tokens(
    datasets: Sequence[IndexedDataset], part: int, parts: int, on_progress: OnProgress = no_report
) -> None:
    """Read and check one of `parts` equal parts of all .bin files together; every data set has checksums.

    Raises DamagedFile with the file, the offset and a remedy; OSError from the file system.
    """
    written = [data.checksums.tokens for data in datasets if data.checksums]
    chunks = [len(checksums.digests) for checksums in written]
    begin, end = (sum(chunks) * edge // parts for edge in (part, part + 1))
    first = 0  # index of this file's first chunk among the chunks of all files
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="verify") as pool:
        for data, checksums, count in zip(datasets, written, chunks, strict=True):
            mine = range(max(begin - first, 0), min(end - first, count))
            first += count
            try:
                path = location(tokens_path(data.prefix))
                with closing(VerifiedFile(path, checksums, on_progress)) as file:
                    file.check(mine, pool.map)
            except DamagedFile as damage:
                raise changed_since_written(data.prefix, damage) from None
