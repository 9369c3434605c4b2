"""Arrays as .npy files, written piece by piece, with the checksums that tell later whether they are whole."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np

from megatron_zpp.storage.checksums import ChecksummedWriter, Checksums, DamagedFile, verify_file

CHECKSUMS = "checksums.json"
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
    sums = json.loads(path.read_text())
    with ThreadPoolExecutor(_THREADS) as pool:
        for name in names:
            if not isinstance(sums, dict) or name not in sums:
                raise DamagedFile(f"{path}: has no checksums of {name}")
            verify_file(directory / _file(name), Checksums.from_json(sums[name], path), pool.map)


def map_array(directory: Path, name: str) -> np.ndarray:
    """The array, mapped. Raises OSError and ValueError when it cannot be read."""
    try:
        return np.load(directory / _file(name), mmap_mode="r", allow_pickle=False)
    except EOFError as error:  # numpy's for an empty file
        raise ValueError(f"{directory / _file(name)}: {error}") from None


def _file(name: str) -> str:
    return f"{name}.npy"
