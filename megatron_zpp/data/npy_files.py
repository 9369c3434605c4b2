"""Arrays in .npy files: written piece by piece, with checksums, and opened without being read."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np

from megatron_zpp.data.file_array import FileArray, OpenFile
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import (
    JSON_LIMIT,
    Checksums,
    DamagedFile,
    thread_count,
    verify_file,
)
from megatron_zpp.storage.files import write_durably
from megatron_zpp.storage.regular import read_limited

CHECKSUMS = "checksums.json"
_HEADER_LIMIT = 4096  # bytes; a header written here has 128


class NpyWriter:
    """Writes NAME.npy files into a directory, and finally their checksums."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checksums: dict[str, Checksums] = {}

    @contextlib.contextmanager
    def open(
        self, name: str, dtype: np.dtype | type, shape: tuple[int, ...]
    ) -> Iterator[Callable[[np.ndarray], None]]:
        """Return a context whose function appends rows to the array; in total they must have `shape`."""
        dtype, size = np.dtype(dtype), 0
        writer = ChecksummedWriter(self._directory / _file(name))

        def write(rows: np.ndarray) -> None:
            nonlocal size
            assert rows.dtype == dtype, f"{name} has dtype {dtype}, got {rows.dtype}"
            size += rows.size
            if rows.size:
                writer.write(np.ascontiguousarray(rows).data)

        try:
            header = BytesIO()
            described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(header, described)
            writer.write(header.getvalue())
            yield write
            assert size == np.prod(shape), f"{name} has shape {shape}, got {size} elements"
            self._checksums[name] = writer.finish()
        finally:
            writer.close()

    def save(self, name: str, values: np.ndarray) -> None:
        """Write a whole array."""
        with self.open(name, values.dtype, values.shape) as write:
            write(values)

    def finish(self) -> None:
        """Write the checksums of all arrays."""
        sums = {name: checksums.to_json() for name, checksums in self._checksums.items()}
        write_durably(self._directory / CHECKSUMS, (json.dumps(sums) + "\n").encode())


def verify_arrays(directory: Path, names: tuple[str, ...]) -> None:
    """Read the arrays. Raises DamagedFile with file and offset if an array differs from what was written.

    Raises OSError and ValueError if an array or its checksums cannot be read.
    """
    path = directory / CHECKSUMS
    sums = json.loads(read_limited(path, JSON_LIMIT))
    with ThreadPoolExecutor(thread_count()) as pool:
        for name in names:
            if not isinstance(sums, dict) or name not in sums:
                raise DamagedFile(f"{path}: has no checksums of {name}")
            verify_file(directory / _file(name), Checksums.from_json(sums[name], path), pool.map)


def open_array(directory: Path, name: str) -> FileArray:
    """Open an array without reading its rows. Raises OSError and ValueError if it cannot be read."""
    file = OpenFile(directory / _file(name))
    start = BytesIO(file.read(0, min(file.size, _HEADER_LIMIT)))
    try:
        if np.lib.format.read_magic(start) != (1, 0):
            raise ValueError("the format version is not 1.0")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(start)
    except ValueError as error:
        raise ValueError(f"{file.path}: {' '.join(str(error).split())}") from None
    array = FileArray(file, dtype, start.tell(), shape)
    if fortran_order or dtype.hasobject or start.tell() + array.nbytes != file.size:
        raise ValueError(f"{file.path}: not an array of shape {shape} and dtype {dtype} in C order")
    return array


def _file(name: str) -> str:
    return f"{name}.npy"
