"""Writes indexed data sets, so that neither an error nor a kill leaves part of one under its final names."""

import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_zpp.data.checksums import DataChecksums, write_checksums
from megatron_zpp.data.file_array import FileArray, OpenFile
from megatron_zpp.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, index_path, tokens_path
from megatron_zpp.data.provenance import provenance_path, write_provenance
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import checksums_of
from megatron_zpp.storage.files import fsync, naming, open_shared

_CHUNK = 1 << 20  # sequences processed at a time, so that memory does not grow with their number
_BUFFER = 1 << 20  # bytes


class IndexedDatasetWriter:
    """Writes one data set, one sequence per document. The final names appear when the data set is complete.

        with IndexedDatasetWriter(prefix, token_dtype(vocab_size), provenance=description) as writer:
            writer.add_document([5, 3, 2])

    Tokens and lengths go straight to PREFIX.bin.partial and PREFIX.idx.partial, so memory does not grow with
    the data. Leaving the `with` block commits. An exception removes the partial files; the next writer
    overwrites those of a killed one. `provenance` describes the tokenizer (see provenance.py); without it,
    the PREFIX.tokenizer.json of an earlier data set is removed. Checksums go to PREFIX.checksums.json (see
    checksums.py).

    Raises ValueError for a token that does not fit `dtype`, a document of 2^31 tokens or more, a data set
    without tokens, and a prefix that another process is writing; OSError from the file system.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype | type | str, provenance: Mapping[str, Any] | None = None
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_documents = 0
        self.num_tokens = 0
        self._provenance, self._committed = provenance, False
        self._code = {np.dtype(name): code for code, name in DTYPE_CODES.items()}[self.dtype]
        assert self.dtype.kind in "iu", f"tokens must be integers, not {self.dtype}"

    def __enter__(self) -> "IndexedDatasetWriter":
        with contextlib.ExitStack() as stack:
            self._index = _open_locked(index_path(self.prefix) + ".partial")
            stack.callback(_close, self._index)  # which releases the lock
            stack.callback(self._discard)  # before that: afterwards, these may be the next writer's files
            self._index.write(bytes(HEADER.size))
            self._tokens = ChecksummedWriter(Path(tokens_path(self.prefix) + ".partial"))
            stack.callback(_close, self._tokens)
            self._closing = stack.pop_all()
        return self

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document, which may be empty."""
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append len(lengths) documents, whose tokens are concatenated in the 1-D `tokens`."""
        tokens, lengths = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        assert not tokens.size or tokens.dtype.kind in "iu", f"tokens must be integers, not {tokens.dtype}"
        assert int(lengths.sum()) == tokens.size, f"lengths sum to {lengths.sum()}, got {tokens.size} tokens"
        if tokens.size and not np.can_cast(tokens.dtype, self.dtype, "safe"):
            self._check_values(int(tokens.min()), int(tokens.max()))
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise ValueError(
                f"{self.prefix}: a document has {lengths.max()} tokens; the format allows up to 2^31-1"
            )
        with naming(tokens_path(self.prefix)):
            self._tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
            self._index.write(lengths.astype("<i4").tobytes())
        self.num_documents += lengths.size
        self.num_tokens += tokens.size

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._closing, naming(tokens_path(self.prefix)):
            if kind is None:
                self._commit()
                self._committed = True

    def _discard(self) -> None:
        for path in (tokens_path(self.prefix), index_path(self.prefix)) if not self._committed else ():
            with contextlib.suppress(OSError):
                Path(f"{path}.partial").unlink()

    def _check_values(self, low: int, high: int) -> None:
        limits = np.iinfo(self.dtype)
        for value in (low, high):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{self.prefix}: token id {value} does not fit {self.dtype.name}")

    def _commit(self) -> None:
        """Give the files their final names.

        The old .idx is removed first and the new one is named last, so that every .idx has the .bin, the
        checksums and the provenance that belong to it.
        """
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
        """Append pointers and document indices to the lengths in the file, and fill in the header."""
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


def _close(file: BinaryIO | ChecksummedWriter) -> None:
    """Close a file whatever the file system says: the commit has reported a full disk."""
    with contextlib.suppress(OSError):
        file.close()


def _open_locked(path: str) -> BinaryIO:
    """Open an empty file at `path`, for writing, that no other writer has locked."""
    while True:
        file = os.fdopen(open_shared(Path(path)), "r+b", buffering=_BUFFER)
        try:
            _lock(file, path)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    file.truncate(0)
                    return file
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()  # or the lock lasts as long as what refers to the error
            raise
        file.close()  # another writer committed meanwhile, and this is its finished index


def _lock(file: BinaryIO, path: str) -> None:
    """Lock the file at `path`. Raises ValueError if another writer holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another process is writing this data set") from None
    except OSError:
        pass  # write all the same on a file system without locks, as Lustre is often mounted
