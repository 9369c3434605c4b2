"""Arrays as .npy files, written piece by piece, with the checksums that tell later whether they are whole."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np

from megatron_zpp.data.file_array import FileArray, OpenFile
from megatron_zpp.storage.checksums import (
    JSON_LIMIT,
    ChecksummedWriter,
    Checksums,
    DamagedFile,
    verify_file,
)
from megatron_zpp.storage.regular import read_limited

CHECKSUMS = "checksums.json"
_HEADER_LIMIT = 4096  # bytes; what is written here has 128
_THREADS = 4  # that read and sum; both leave Python's lock


class ArrayFiles:
    """Writes NAME.npy into a directory, and at last the checksums of all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checksums: dict[str, Checksums] = {}

    @contextlib.contextmanager
    def open(
        self, name: str, dtype: np.dtype | type, shape: tuple[int, ...]
    ) -> Iterator[Callable[[np.ndarray], None]]:
        """What is entered takes the array's rows, some at a time; they must be `shape` in all."""
        dtype, size = np.dtype(dtype), 0
        writer = ChecksummedWriter(self._directory / _file(name))

        def write(rows: np.ndarray) -> None:
            nonlocal size
            assert rows.dtype == dtype, f"{name} is of {dtype}, not {rows.dtype}"
            size += rows.size
            if rows.size:
                writer.write(np.ascontiguousarray(rows).data)

        try:
            header = BytesIO()
            described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(header, described)
            writer.write(header.getvalue())
            yield write
            assert size == np.prod(shape), f"{name} has {size} elements, not {shape}"
            self._checksums[name] = writer.finish()
        finally:
            writer.close()

    def save(self, name: str, values: np.ndarray) -> None:
        """A whole array."""
        with self.open(name, values.dtype, values.shape) as write:
            write(values)

    def finish(self) -> None:
        """Writes down the checksums."""
        sums = {name: checksums.to_json() for name, checksums in self._checksums.items()}
        (self._directory / CHECKSUMS).write_text(json.dumps(sums) + "\n")


def verify(directory: Path, names: tuple[str, ...]) -> None:
    """Reads the arrays. Raises DamagedFile, naming file and place, unless all are as they were written.

    OSError and ValueError are raised where they, or their checksums, cannot be read.
    """
    path = directory / CHECKSUMS
    sums = json.loads(read_limited(path, JSON_LIMIT))
    with ThreadPoolExecutor(_THREADS) as pool:
        for name in names:
            if not isinstance(sums, dict) or name not in sums:
                raise DamagedFile(f"{path}: has no checksums of {name}")
            verify_file(directory / _file(name), Checksums.from_json(sums[name], path), pool.map)


def open_array(directory: Path, name: str) -> FileArray:
    """The array, of which nothing is read yet. Raises OSError and ValueError when it cannot be read."""
    file = OpenFile(directory / _file(name))
    start = BytesIO(file.read(0, min(file.size, _HEADER_LIMIT)))
    try:
        if np.lib.format.read_magic(start) != (1, 0):
            raise ValueError("not of version 1.0")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(start)
    except ValueError as error:
        raise ValueError(f"{file.path}: {' '.join(str(error).split())}") from None
    array = FileArray(file, dtype, start.tell(), shape)
    if fortran_order or dtype.hasobject or start.tell() + array.nbytes != file.size:
        raise ValueError(f"{file.path}: not an array of shape {shape} and type {dtype} in C order")
    return array


def _file(name: str) -> str:
    return f"{name}.npy"
