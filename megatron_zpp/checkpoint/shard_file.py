"""Writes the file of one rank's shards in one pass, and reads it by range, with checksums.

The format (github.com/huggingface/safetensors): a little-endian uint64 N; N bytes of JSON with dtype,
shape and offsets of each tensor; the tensors' bytes. The safetensors library can read these files.
"""

import json
import operator
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import (
    Checksums,
    DamagedFile,
    OnProgress,
    RecentChunks,
    Runner,
    VerifiedFile,
    no_report,
)
from megatron_zpp.storage.location import Location

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.upload import ChecksummedUpload

DTYPES = {  # buffers may have any of them; states are fp32, or in a form of ops/state_codes.py
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # of the first tensor
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own


def write_shard_file(
    path: Location, tensors: Mapping[str, Tensor], on_progress: OnProgress = no_report
) -> Checksums:
    """Write tensors of any device, and make them durable. Raises OSError if the file system does."""
    entries, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    header = json.dumps(entries).encode()
    header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
    writer = _writer_of(path, _LENGTH.size + len(header) + start, on_progress)
    try:
        writer.write(_LENGTH.pack(len(header)) + header)
        for tensor in tensors.values():
            writer.write(_bytes_of(tensor.detach().contiguous().cpu()))
        return writer.finish()
    finally:
        writer.close()


class ShardFile:
    """Reads a file of `write_shard_file`, as VerifiedFile does. Raises DamagedFile if it has changed."""

    def __init__(
        self,
        path: Location,
        checksums: Checksums,
        on_progress: OnProgress = no_report,
        recent: RecentChunks | None = None,
    ) -> None:
        self.file = VerifiedFile(path, checksums, on_progress, recent)
        try:
            self._entries = self._read_header(path, checksums.size)
        except (DamagedFile, OSError):
            self.file.close()
            raise

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor of the file; None if it has no such tensor, or of no dtype that is known."""
        entry = self._entries.get(name)
        return None if entry is None else _TORCH_DTYPES.get(entry["dtype"])

    def read_into(self, name: str, start: int, target: Tensor, run: Runner = map) -> None:
        """Fill the one-dimensional CPU tensor `target` with elements of `name`, beginning at `start`."""
        entry = self._entries.get(name)
        if entry is None:
            raise DamagedFile(f"{self.file.path}: has no tensor {name}")
        begin, stop = entry["data_offsets"]
        first = begin + start * target.element_size()
        if entry["dtype"] != DTYPES[target.dtype] or first + target.nbytes > stop:
            raise DamagedFile(
                f"{self.file.path}: {name} is {entry['dtype']} in bytes {begin} to {stop}; "
                f"{target.numel()} elements of {DTYPES[target.dtype]} from {start} on are asked for"
            )
        self.file.read_into(self._data + first, _bytes_of(target), run)

    def _read_header(self, path: Location, size: int) -> dict:
        prefix = bytearray(_LENGTH.size)
        self.file.read_into(0, memoryview(prefix))
        (length,) = _LENGTH.unpack(prefix)
        if length > (most := min(size - _LENGTH.size, _HEADER_LIMIT)):
            raise DamagedFile(f"{path}: a header of {length} bytes; it may have {most}")
        header = bytearray(length)
        self.file.read_into(_LENGTH.size, memoryview(header))
        self._data = _LENGTH.size + length
        try:
            entries = json.loads(header)
            for entry in entries.values():
                begin, stop = map(operator.index, entry["data_offsets"])
                if not 0 <= begin <= stop <= size - self._data:
                    raise ValueError(f"a tensor in bytes {begin} to {stop}")
                if type(entry["dtype"]) is not str:
                    raise ValueError(f"a tensor of {entry['dtype']!r}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedFile(f"{path}: not the header of a safetensors file ({error!r})") from None
        return entries


def _writer_of(path: Location, size: int, on_progress: OnProgress) -> "ChecksummedWriter | ChecksummedUpload":
    if not isinstance(path, Path):
        from megatron_zpp.storage.objects.upload import ChecksummedUpload

        return ChecksummedUpload(path, size, on_progress=on_progress)
    return ChecksummedWriter(path, on_progress=on_progress)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
