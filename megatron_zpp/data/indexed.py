"""The indexed data set on disk, as Megatron-LM reads and writes it: PREFIX.bin and PREFIX.idx.

Both are little-endian. PREFIX.bin is the tokens, concatenated. PREFIX.idx says where each sequence lies:

    byte      field
    0         9 bytes `MMIDIDX\\0\\0`
    9         uint64 version, 1
    17        uint8  dtype code of the tokens
    18        uint64 S, the number of sequences
    26        uint64 D, the number of documents + 1
    34        int32  lengths[S], in tokens
    34 + 4S   int64  pointers[S], the byte of PREFIX.bin at which each sequence begins
    34 + 12S  int64  document_indices[D], the first sequence of each document, and S at the end
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from megatron_zpp.data.checksums import DataChecksums, checksums_path, read_checksums, write_checksums
from megatron_zpp.data.file_array import FileArray, OpenFile
from megatron_zpp.data.index_checks import check_document_indices, check_lengths_and_pointers
from megatron_zpp.data.provenance import provenance_path, write_provenance
from megatron_zpp.storage.checksums import ChecksummedWriter, DamagedFile, checksums_of, verify_file
from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.regular import UnfitFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D
DTYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

_CHUNK = 1 << 20  # sequences handled at a time, so that memory does not grow with their number
_BUFFER = 1 << 20  # bytes


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that tokens of a vocabulary are stored in: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def index_path(prefix: str) -> str:
    """PREFIX.idx."""
    return prefix + ".idx"


def tokens_path(prefix: str) -> str:
    """PREFIX.bin."""
    return prefix + ".bin"


class IndexedDatasetWriter:
    """Writes one data set, a sequence a document; nothing stands under the final names before it is whole.

        with IndexedDatasetWriter(prefix, token_dtype(vocab_size), provenance=description) as writer:
            writer.add_document([5, 3, 2])

    Tokens and lengths go straight to PREFIX.bin.partial and PREFIX.idx.partial, so memory does not grow with
    the data. Leaving the `with` block commits; leaving it by an exception removes the partial files, and
    those of a killed writer are overwritten by the next. `provenance` describes the tokenizer (see
    provenance.py); without it a PREFIX.tokenizer.json left by an earlier data set is removed. Checksums of
    what was written go to PREFIX.checksums.json (see checksums.py).

    Raises ValueError for a token that does not fit `dtype`, a document of 2^31 tokens or more, a data set of
    no tokens, and a prefix that another process is writing; OSError as the file system does.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype | type | str, provenance: Mapping[str, Any] | None = None
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self._provenance = provenance
        self._code = {np.dtype(name): code for code, name in DTYPE_CODES.items()}[self.dtype]
        assert self.dtype.kind in "iu", f"tokens are integers, not {self.dtype}"

    def __enter__(self) -> "IndexedDatasetWriter":
        self._index = _open_locked(index_path(self.prefix) + ".partial")
        try:
            self._index.write(bytes(HEADER.size))
            self._tokens = ChecksummedWriter(Path(tokens_path(self.prefix) + ".partial"))
        except BaseException:
            Path(index_path(self.prefix) + ".partial").unlink(missing_ok=True)
            self._index.close()
            raise
        return self

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document; a document of no tokens is legal."""
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Appends len(lengths) documents whose tokens lie one after the other in the 1-D `tokens`."""
        tokens, lengths = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        assert tokens.ndim == 1, f"tokens are one-dimensional, not {tokens.shape}"
        assert not tokens.size or tokens.dtype.kind in "iu", f"tokens are integers, not {tokens.dtype}"
        assert int(lengths.sum()) == tokens.size, f"lengths sum to {lengths.sum()}, tokens are {tokens.size}"
        assert not (lengths < 0).any(), "a length is 0 or more"
        if tokens.size and not np.can_cast(tokens.dtype, self.dtype, "safe"):
            self._check_values(int(tokens.min()), int(tokens.max()))
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise ValueError(
                f"{self.prefix}: a document of {lengths.max()} tokens; the format holds up to 2^31-1"
            )
        self._tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._index.write(lengths.astype("<i4").tobytes())
        self.num_documents += lengths.size
        self.num_tokens += tokens.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        committed = False
        try:
            if kind is None:
                self._commit()
                committed = True
        finally:
            if not committed:  # while the lock is still held, or these could be the next writer's
                for path in (tokens_path(self.prefix), index_path(self.prefix)):
                    Path(f"{path}.partial").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a full disk was reported by the commit
                self._tokens.close()
            with contextlib.suppress(OSError):
                self._index.close()

    def _check_values(self, low: int, high: int) -> None:
        limits = np.iinfo(self.dtype)
        for value in (low, high):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{self.prefix}: token id {value} does not fit {self.dtype.name}")

    def _commit(self) -> None:
        """Gives the files their final names: the old .idx goes first and the new one comes last, so that
        whoever finds an .idx finds the .bin, the checksums and the provenance that belong to it."""
        if not self.num_tokens:
            raise ValueError(f"{self.prefix}: no tokens to write ({self.num_documents} empty documents)")
        self._finish_index()
        self._index.flush()
        os.fsync(self._index.fileno())
        index, tokens = (Path(f"{path(self.prefix)}.partial") for path in (index_path, tokens_path))
        checksums = DataChecksums(checksums_of(index), self._tokens.finish())
        directory = index.parent
        Path(index_path(self.prefix)).unlink(missing_ok=True)
        fsync(directory)
        if self._provenance is None:
            Path(provenance_path(self.prefix)).unlink(missing_ok=True)
        else:
            write_provenance(self.prefix, self._provenance)
        write_checksums(self.prefix, checksums)
        os.replace(tokens, tokens_path(self.prefix))
        fsync(directory)
        os.replace(index, index_path(self.prefix))
        fsync(directory)

    def _finish_index(self) -> None:
        """Header and lengths are in the file: appends pointers and document indices, fills in the header."""
        index, count = self._index, self.num_documents
        index.flush()
        lengths = FileArray(OpenFile(index_path(self.prefix) + ".partial"), "<i4", HEADER.size, (count,))
        position = 0  # bytes of .bin
        for first in range(0, count, _CHUNK):
            ends = position + np.cumsum(lengths[first : first + _CHUNK], dtype=np.int64) * self.dtype.itemsize
            index.write(np.concatenate(([position], ends[:-1])).astype("<i8").tobytes())
            position = int(ends[-1])
        for first in range(0, count + 1, _CHUNK):
            index.write(np.arange(first, min(first + _CHUNK, count + 1), dtype="<i8").tobytes())
        index.seek(0)
        index.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))


class IndexedDataset:
    """A data set whose index has been checked against itself, the size of PREFIX.bin and, where there is one,
    PREFIX.checksums.json. Both files stay open, and are read as their arrays are indexed (see file_array.py).

    `prefix` may also be the name of either file. Pickling keeps the prefix alone: a worker process opens the
    files again.

    lengths            (S,) int32, tokens of each sequence
    pointers           (S,) int64, byte of PREFIX.bin at which each sequence begins
    document_indices   (D,) int64, first sequence of each document, then S
    tokens             (T,) dtype, the whole of PREFIX.bin
    checksums          of both files as they were written, or None

    Raises ValueError, one line with the file, the byte offset, what was found and what would be right, when
    a file is missing, empty, foreign, truncated or overlong, holds no tokens or no integer tokens, or when
    checksum, lengths, pointers, document indices and the size of PREFIX.bin do not agree. Reading an array
    raises DamagedFile, a ValueError, when its file has become shorter since.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
        path = index_path(self.prefix)
        file = _open(path)
        self.checksums = read_checksums(self.prefix)
        if self.checksums is not None:
            self._verify_index()
        self.dtype, sequences, documents = _read_header(file)
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        expected = documents_at + 8 * documents
        if file.size != expected:
            what = "truncated" if file.size < expected else "longer than it should be"
            raise ValueError(
                f"{path}: {what} at byte {min(file.size, expected)}: {file.size} bytes found, "
                f"{expected} needed for {sequences} sequences and {documents} document indices"
            )
        self.lengths = FileArray(file, "<i4", lengths_at, (sequences,))
        self.pointers = FileArray(file, "<i8", pointers_at, (sequences,))
        self.document_indices = FileArray(file, "<i8", documents_at, (documents,))
        # A sequence ends where the next begins. What follows the last pointer is the first document index.
        self._bounds = FileArray(file, "<i8", pointers_at, (sequences + 1,))
        self.num_tokens = check_lengths_and_pointers(
            path, self.lengths, self.pointers, self.dtype.itemsize, lengths_at, pointers_at
        )
        check_document_indices(path, self.document_indices, sequences, documents_at)
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
        """First token of each sequence, and the one after its last: (len,) int64 to two of them."""
        both = (
            self._bounds.gather(sequences, np.full(len(sequences), 2)).reshape(-1, 2) // self.dtype.itemsize
        )
        ends = np.where(sequences == self.num_sequences - 1, self.num_tokens, both[:, 1])
        return both[:, 0], ends

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def _verify_index(self) -> None:
        try:
            verify_file(Path(index_path(self.prefix)), self.checksums.index)
        except DamagedFile as damage:
            raise unlike_what_was_written(self.prefix, damage) from None

    def _open_tokens(self) -> FileArray:
        path = tokens_path(self.prefix)
        file, expected = _open(path), self.num_tokens * self.dtype.itemsize
        size = file.size
        if size != expected:
            what = "truncated" if size < expected else "longer than it should be"
            raise ValueError(
                f"{path}: {what} at byte {min(size, expected)}: {size} bytes found, {expected} needed for "
                f"the {self.num_tokens} {self.dtype.name} tokens of {index_path(self.prefix)}"
            )
        if not self.num_tokens:
            raise ValueError(f"{path}: 0 tokens; a data set needs at least one")
        return FileArray(file, self.dtype, 0, (self.num_tokens,))


def unlike_what_was_written(prefix: str, damage: DamagedFile) -> DamagedFile:
    """Damage to a file of a data set, with what to do about it."""
    return DamagedFile(
        f"{damage}; preprocess the data again, or remove {checksums_path(prefix)} if another program wrote "
        "this data since"
    )


def _read_header(file: OpenFile) -> tuple[np.dtype, int, int]:
    """Token dtype, S and D."""
    path, size = file.path, file.size
    start = file.read(0, min(size, HEADER.size))
    if start[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path}: byte 0: found {start[: len(MAGIC)]!r}, an index begins with {MAGIC!r}")
    if size < HEADER.size:
        raise ValueError(f"{path}: truncated at byte {size}: the header alone is {HEADER.size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(start)
    if version != VERSION:
        raise ValueError(f"{path}: byte 9: version {version}, only version {VERSION} is known")
    if code not in DTYPE_CODES or np.dtype(DTYPE_CODES[code]).kind == "f":
        raise ValueError(
            f"{path}: byte 17: dtype code {code} is no token type; tokens are 1 uint8, 2 int8, 3 int16, "
            "4 int32, 5 int64 or 8 uint16"
        )
    return np.dtype(DTYPE_CODES[code]), sequences, documents


def _open(path: str) -> OpenFile:
    try:
        file = OpenFile(path)
    except FileNotFoundError:
        prefix = path[: -len(".idx")]
        raise ValueError(
            f"{path}: no such file; the data set {prefix} is {prefix}.bin and {prefix}.idx"
        ) from None
    except UnfitFile as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not file.size:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    return file


def _open_locked(path: str) -> BinaryIO:
    """An empty file at `path` that no other writer holds, for writing."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=_BUFFER)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{path}: another process is writing this data set") from None
        except OSError:
            pass  # a file system without locks (Lustre is often mounted so) is no reason not to write
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                file.truncate(0)
                return file
        file.close()  # the other writer committed in between, and this is now its finished index
