"""A cache of arrays on disk: each is computed once and then read by every process that needs it.

An entry is a directory KEY with one .npy file per array, `checksums.json`, and `made_of.json`, of which KEY
is the digest. The directory gets its name when it is complete. Entries may be removed while no run uses them.

An entry is data, not code, and may be shared like the data set beside it: its permissions follow from the
umask, and it is used if its checksums match, whoever owns it.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.file_array import FileArray, OpenFile
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.checksums import JSON_LIMIT, Checksums, DamagedFile, thread_count, verify_file
from megatron_zpp.storage.files import check_writable, fsync, locked, write_durably
from megatron_zpp.storage.regular import open_stream, read_limited

_EDGE = 1 << 16  # bytes at either end of a file that are part of its digest
_MADE_OF, CHECKSUMS = "made_of.json", "checksums.json"
_HEADER_LIMIT = 4096  # bytes of an .npy file; a header written here has 128
NamedArrays: TypeAlias = Iterable[tuple[str, np.ndarray]]
CachedArrays: TypeAlias = dict[str, FileArray]  # of an entry, by name


def contents_of(path: str) -> dict[str, Any]:
    """Return what distinguishes a file from others and later versions: size, time, digest of both ends."""
    digest = hashlib.sha256()
    with open_stream(path) as file:
        status = os.fstat(file.fileno())
        digest.update(file.read(_EDGE))
        file.seek(max(0, status.st_size - _EDGE))
        digest.update(file.read(_EDGE))
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ends": digest.hexdigest()}


class OrderCache:
    """The entries of one directory, which is created for the first entry."""

    def __init__(
        self, config: DataConfig, prefix: str, say: Callable[[str], None], *, keeps: bool = True
    ) -> None:
        """In --data-cache-path, or beside the data set `prefix`; `say` gets a line when an entry is built.

        With `keeps` false an entry that is built leaves no file, and its arrays cannot be sent to workers.
        """
        self._keeps = keeps
        self._flag = "--data-cache-path" if config.data_cache_path else "--data-cache-path (not given)"
        self._directory, self._say = Path(config.data_cache_path or f"{prefix}.orders"), say

    def get(self, made_of: Mapping[str, Any], build: Callable[[], NamedArrays], what: str) -> CachedArrays:
        """Return the arrays that `made_of["indexes"]` names, checked and opened; `build` makes missing ones.

        If several processes need an entry, one builds it and the others wait; then all check it at once. On a
        file system without locks each builds it, and the first one to finish is kept. Raises ValueError if
        the directory cannot be written, or if the entry is damaged or cannot be read.
        """
        text = json.dumps(dict(made_of), sort_keys=True, indent=1)
        entry = self._directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        if self._keeps or entry.is_dir():
            return self._get(entry, text, build, f"{what}, once; {entry}", made_of["indexes"])
        check_writable(self._flag, str(self._directory))
        with tempfile.TemporaryDirectory() as scratch:
            return self._get(Path(scratch) / entry.name, text, build, what, made_of["indexes"])

    def _get(
        self, entry: Path, text: str, build: Callable[[], NamedArrays], what: str, names: tuple[str, ...]
    ) -> CachedArrays:
        directory = entry.parent
        try:
            if not entry.is_dir():
                directory.mkdir(parents=True, exist_ok=True)
                with locked(directory / "lock"):
                    if not entry.is_dir():
                        self._say(f"building {what}")
                        self._build(entry, text, build)
        except OSError as error:
            fix = f"{error.strerror}; name a writable directory with free space"
            raise option_error(self._flag, directory, fix) from None
        try:
            verify_arrays(entry, names)
            return {name: open_array(entry, name) for name in names}
        except (OSError, ValueError) as error:
            fix = f"start again once it can be read; if it is damaged, remove {entry}, and it is built again"
            raise option_error(self._flag, directory, f"{one_line(error)}; {fix}") from None

    def _build(self, entry: Path, text: str, build: Callable[[], NamedArrays]) -> None:
        with tempfile.TemporaryDirectory(prefix=f"{entry.name}.building-", dir=entry.parent) as name:
            complete = Path(name) / "entry"
            complete.mkdir()
            write_arrays(complete, build())
            write_durably(complete / _MADE_OF, (text + "\n").encode())
            for path in (*complete.iterdir(), complete):
                fsync(path)
            try:
                os.rename(complete, entry)
            except OSError:
                if not entry.is_dir():  # otherwise, without locks, another process was faster
                    raise
        fsync(entry.parent)


def write_arrays(directory: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write each array to NAME.npy, and finally their checksums. Raises OSError from the file system."""
    sums = {}
    for name, values in arrays:
        with closing(ChecksummedWriter(directory / f"{name}.npy")) as writer:
            np.lib.format.write_array(writer, values, version=(1, 0), allow_pickle=False)
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
            verify_file(directory / f"{name}.npy", Checksums.from_json(sums[name], path), pool.map)


def open_array(directory: Path, name: str) -> FileArray:
    """Open an array that `verify_arrays` has read, without reading its rows. Raises OSError."""
    file = OpenFile(directory / f"{name}.npy")
    start = BytesIO(file.read(0, min(file.size, _HEADER_LIMIT)))
    np.lib.format.read_magic(start)
    shape, _, dtype = np.lib.format.read_array_header_1_0(start)
    return FileArray(file, dtype, start.tell(), shape)
