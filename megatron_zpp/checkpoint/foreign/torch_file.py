"""Reads what torch.save writes: a zip archive of a pickle, read as data, and the bytes of tensors.

A tensor stays in its file until `StoredTensor.read`. Nothing is unpacked: torch stores without compression.
The archive has a CRC-32 of each storage, which is checked before the first of its tensors is returned; it is
zero where torch.serialization.set_crc32_options(False) was in force.
"""

import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_zpp.checkpoint.foreign.pickled import NotData, read_pickle
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.regular import open_stream

_PIECE = 1 << 20  # bytes read at a time
_PICKLE_LIMIT = 1 << 30  # bytes of the pickle alone; tensors are beside it
_DIRECTORY_LIMIT = 16 << 20  # bytes of the archive's list of files: 100,000 tensors and more
_MOST_DIMENSIONS = 64  # torch's limit
_LARGEST_SIZE = 1 << 60  # elements
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_DAMAGES = (
    *(zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
)


@dataclass
class _Storage:
    """Elements of one type in a file, from byte `start` on; `crc` is 0 if the file does not say it."""

    path: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    crc: int
    checked: bool = False

    def check(self, file: BinaryIO) -> None:
        """Compare the bytes with their CRC-32, once. Raises DamagedFile."""
        if self.checked or not self.crc:
            return
        file.seek(self.start)
        left, found = self.nbytes, 0
        while left and (piece := file.read(min(left, _PIECE))):
            found, left = zlib.crc32(piece, found), left - len(piece)
        if left or found != self.crc:
            where = f"{self.path}: damaged between bytes {self.start} and {self.start + self.nbytes}"
            raise DamagedFile(f"{where}: its CRC-32 differs; copy the file again")
        self.checked = True


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `offset` and `stride` count elements of its storage."""

    storage: _Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """Return the tensor on the CPU, in its own format. Raises DamagedFile if the file ends too early."""
        dtype, size = self.storage.dtype, self.storage.dtype.itemsize
        reach = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        with open_stream(self.storage.path) as file:
            self.storage.check(file)
            file.seek(self.storage.start + self.offset * size)
            content = bytearray(file.read(reach * size))
            if len(content) != reach * size:
                raise DamagedFile(f"{self.storage.path}: ends before a tensor of it does")
        flat = torch.frombuffer(content, dtype=dtype)
        return flat.as_strided(self.shape, self.stride)


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Return the value in a file, or in `length` bytes of it; tensors in it are StoredTensors.

    Raises DamagedFile for what torch.save has not written whole, NotData, naming the file, for code.
    """
    try:
        with open_stream(path) as file:
            size = os.fstat(file.fileno()).st_size
            window = _Window(file, start, size - start if length is None else length)
            with zipfile.ZipFile(window) as archive:
                window.limit = window.length
                return _read(path, start, file, archive)
    except NotData as error:
        raise NotData(f"{path}: {error}") from None
    except _DAMAGES as error:
        reason = f"not a whole file of torch.save's zip format ({str(error) or type(error).__name__})"
        fix = "copy it again, or save it with torch 1.6 or later"
        raise DamagedFile(f"{path}: {reason}; {fix}") from None


def sizes_of(value: Any) -> tuple[int, ...]:
    """A shape or the like that a file has. Raises NotData for what is none of any tensor."""
    if not isinstance(value, list | tuple) or len(value) > _MOST_DIMENSIONS:
        raise NotData(f"has a tensor of no shape, or of more than {_MOST_DIMENSIONS} dimensions")
    if not all(type(one) is int and 0 <= one < _LARGEST_SIZE for one in value):
        raise NotData("has a tensor with a size that none has")
    return tuple(value)


def read_pickle_file(path: Path) -> Any:
    """Return the value in a file that is a bare pickle. Raises NotData, naming the file."""
    with open_stream(path) as file:
        content = file.read(_PICKLE_LIMIT + 1)
    try:
        if len(content) > _PICKLE_LIMIT:
            raise NotData(f"is longer than {_PICKLE_LIMIT:,} bytes")
        return read_pickle(content, _no_persistent)
    except NotData as error:
        raise NotData(f"{path}: {error}") from None


def _no_persistent(value: Any) -> Any:
    raise NotData("refers to tensors beside it, and there are none")


class _Window:
    """A part of a file as a file, for zipfile."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._place = file, start, 0
        self.length = max(length, 0)
        self.limit = _DIRECTORY_LIMIT  # bytes read at once

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise zipfile.BadZipFile("it is too short")
        self._place = base + offset
        return self._place

    def read(self, count: int = -1) -> bytes:
        left = max(self.length - self._place, 0)
        wanted = left if count < 0 else min(count, left)
        if wanted > self.limit:
            raise zipfile.BadZipFile(f"its list of files is longer than {self.limit:,} bytes")
        self._file.seek(self._start + self._place)
        found = self._file.read(wanted)
        self._place += len(found)
        return found


def _read(path: Path, start: int, file: Any, archive: zipfile.ZipFile) -> Any:
    entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
    if "data.pkl" not in entries:
        raise zipfile.BadZipFile("it has no data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in entries.values()):
        raise zipfile.BadZipFile("its entries are compressed")
    order = entries.get("byteorder")
    if order is not None and (order.file_size > 10 or archive.read(order) != b"little"):
        raise NotData("was written on a big-endian machine; save it again on another one")
    if entries["data.pkl"].file_size > _PICKLE_LIMIT:
        raise NotData(f"its pickle is longer than {_PICKLE_LIMIT:,} bytes")
    storages: dict[tuple[str, torch.dtype], _Storage] = {}  # tensors may share one

    def storage(value: Any) -> _Storage:
        _, kind, key, _, count = value  # "storage", its class, the name of its file, device, elements
        if not isinstance(key, str) or f"data/{key}" not in entries:
            raise NotData("has a tensor whose bytes are not there")
        dtype, info = _STORAGES[kind.name], entries[f"data/{key}"]
        if (key, dtype) in storages:
            return storages[key, dtype]
        if type(count) is not int or not 0 <= count * dtype.itemsize <= info.file_size:
            raise NotData(f"its tensor data/{key} is shorter than it says")
        begin = _data_start(file, start + info.header_offset)
        if begin + info.file_size > os.fstat(file.fileno()).st_size:
            raise zipfile.BadZipFile("it ends too early")
        storages[key, dtype] = _Storage(path, begin, info.file_size, dtype, info.CRC)
        return storages[key, dtype]

    return read_pickle(archive.read(entries["data.pkl"]), storage, _MAKERS)


def _data_start(file: Any, header: int) -> int:
    """Return where the bytes of an entry begin whose header is at byte `header` of the file."""
    file.seek(header)
    found = file.read(30)
    if found[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("an entry has no header")
    return header + 30 + int.from_bytes(found[26:28], "little") + int.from_bytes(found[28:30], "little")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    (offset,), shape, stride = map(sizes_of, ((offset,), shape, stride))
    if not isinstance(storage, _Storage):
        raise NotData("has a tensor without a storage")
    reach = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if math.prod(shape) and max(offset + reach, math.prod(shape)) * storage.dtype.itemsize > storage.nbytes:
        raise NotData("has a tensor that is longer than its storage")
    return StoredTensor(storage, shape, stride, offset)


_MAKERS = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
}
