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
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.data.file_array import FileArray
from megatron_zpp.data.npy_files import open_array, verify_arrays, write_arrays
from megatron_zpp.storage.files import fsync, locked, write_durably
from megatron_zpp.storage.regular import open_stream

_EDGE = 1 << 16  # bytes at either end of a file that are part of its digest
_MADE_OF = "made_of.json"
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

    def __init__(self, flag: str, directory: str, say: Callable[[str], None]) -> None:
        """`flag` names the directory in errors; `say` gets a line whenever an entry is built."""
        self._flag, self._directory, self._say = flag, Path(directory), say

    @classmethod
    def of(cls, config: DataConfig, prefix: str, say: Callable[[str], None]) -> "OrderCache":
        """The cache in --data-cache-path, or beside the data set `prefix`."""
        flag = "--data-cache-path" if config.data_cache_path else "--data-cache-path (not given)"
        return cls(flag, config.data_cache_path or f"{prefix}.orders", say)

    def get(
        self,
        made_of: Mapping[str, Any],
        names: tuple[str, ...],
        build: Callable[[], NamedArrays],
        what: str,
    ) -> CachedArrays:
        """Return the arrays `names`, checked and opened; `build` makes them if they are missing.

        If several processes need an entry, one builds it and the others wait; then all check it at once. On a
        file system without locks each builds it, and the first one to finish is kept. Raises ValueError if
        the directory cannot be written, or if the entry is damaged or cannot be read.
        """
        text = json.dumps(dict(made_of), sort_keys=True, indent=1)
        entry = self._directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        try:
            if not entry.is_dir():
                self._directory.mkdir(parents=True, exist_ok=True)
                with locked(self._directory / "lock"):
                    if not entry.is_dir():
                        self._say(f"building {what}, once; {entry}")
                        self._build(entry, text, build)
        except OSError as error:
            fix = f"{error.strerror}; name a writable directory with free space"
            raise option_error(self._flag, self._directory, fix) from None
        try:
            verify_arrays(entry, names)
            return {name: open_array(entry, name) for name in names}
        except (OSError, ValueError) as error:
            fix = f"start again once it can be read; if it is damaged, remove {entry}, and it is built again"
            raise option_error(self._flag, self._directory, f"{one_line(error)}; {fix}") from None

    def _build(self, entry: Path, text: str, build: Callable[[], NamedArrays]) -> None:
        with tempfile.TemporaryDirectory(prefix=f"{entry.name}.building-", dir=self._directory) as name:
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
        fsync(self._directory)
