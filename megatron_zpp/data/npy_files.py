"""Arrays in .npy files: written with checksums, and opened without being read."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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


def write_arrays(directory: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write each array to NAME.npy, and finally their checksums. Raises OSError from the file system."""
    sums = {}
    for name, values in arrays:
        with closing(ChecksummedWriter(directory / _file(name))) as writer:
            header = BytesIO()
            np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
            writer.write(header.getvalue())
            if values.size:
                writer.write(np.ascontiguousarray(values).data)
            sums[name] = writer.finish().to_json()
    write_durably(directory / CHECKSUMS, (json.dumps(sums) + "\n").encode())


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
