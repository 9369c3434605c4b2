"""A cache of arrays on disk: each is computed once and then read by every process that needs it.

An entry is a directory KEY with one .npy file per array, `checksums.json`, and `made_of.json`, of which KEY
is the digest. The directory gets its name when it is complete. Entries may be removed while no run uses them.
A damaged entry becomes KEY.replaced-…, which a later build removes after 30 days: on a network file system,
processes that have its files open would lose them at once if the files were removed.

An entry is data, not code, and may be shared like the data set beside it: its permissions follow from the
umask, and it is used if its checksums match, whoever owns it.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.data.file_array import FileArray
from megatron_zpp.data.npy_files import NpyWriter, open_array, verify_arrays
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.files import fsync, identity, locked, write_durably
from megatron_zpp.storage.regular import open_stream, read_again_after_error, says_what_is_there

_EDGE = 1 << 16  # bytes at either end of a file that are part of its digest
_MADE_OF = "made_of.json"
_REPLACED = "replaced-"
_REPLACED_SECONDS = 30 * 86400  # for which a replaced entry is kept


def contents_of(path: str) -> dict[str, Any]:
    """Return what distinguishes a file from others and later versions: size, time, digest of both ends."""
    digest = hashlib.sha256()
    with open_stream(path) as file:
        status = os.fstat(file.fileno())
        digest.update(file.read(_EDGE))
        file.seek(max(0, status.st_size - _EDGE))
        digest.update(file.read(_EDGE))
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ends": digest.hexdigest()}


class CachedArrays:
    """The arrays of an entry, by name. Pickling stores the path only: a worker process opens the files again.

    Raises OSError and ValueError if they cannot be read.
    """

    def __init__(self, entry: Path, names: tuple[str, ...]) -> None:
        self._entry, self._names = entry, names
        self._arrays = {name: open_array(entry, name) for name in names}

    def __getitem__(self, name: str) -> FileArray:
        return self._arrays[name]

    def __reduce__(self) -> tuple[type["CachedArrays"], tuple[Path, tuple[str, ...]]]:
        return CachedArrays, (self._entry, self._names)


class OrderCache:
    """The entries of one directory, which is created for the first entry."""

    def __init__(self, flag: str, directory: str, say: Callable[[str], None]) -> None:
        """`flag` names the directory in errors; `say` gets a line whenever an entry is built."""
        self._flag, self._directory, self._say = flag, Path(directory), say

    def get(
        self,
        made_of: Mapping[str, Any],
        names: tuple[str, ...],
        build: Callable[[NpyWriter], None],
        what: str,
    ) -> CachedArrays:
        """Return the arrays `names`, checked and opened; `build` writes them if they are missing.

        If several processes need an entry, one builds it and the others wait. On a file system without locks
        each builds it, and the first one to finish is kept. An entry that is damaged is built again. Raises
        ValueError if the directory cannot be written, or the entry cannot be read.
        """
        text = json.dumps(dict(made_of), sort_keys=True, indent=1)
        entry = self._directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        try:
            while True:
                found = self._look(entry, names)
                if found.arrays is not None:
                    return found.arrays
                self._directory.mkdir(parents=True, exist_ok=True)
                with locked(self._directory / "lock"):
                    if identity(entry) != found.identity:
                        continue  # another process has built it: all who waited check it at once, unlocked
                    if found.identity is not None:
                        found = self._look(entry, names)  # the bytes may have changed on their way here
                        if found.arrays is not None:
                            return found.arrays
                    once_or_again = f"again: {found.problem}" if found.problem else f"once; {entry}"
                    self._say(f"building {what}, {once_or_again}")
                    self._build(entry, text, build, replace=found.identity is not None)
                return CachedArrays(entry, names)
        except OSError as error:
            fix = f"{error.strerror}; name a writable directory with free space"
            raise option_error(self._flag, self._directory, fix) from None

    def _look(self, entry: Path, names: tuple[str, ...]) -> "_Found":
        """Check and open an entry. Raises ValueError if it cannot be read, which says nothing about it."""
        found = None
        try:
            found = read_again_after_error(entry, lambda: identity(entry))
            return _Found(None) if found is None else _Found(found, _verified(entry, names))
        except FileNotFoundError:
            return _Found(found, problem=f"a file of {entry} is missing")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not says_what_is_there(error):
                reason = one_line(error) if error.filename else f"{entry}: {error.strerror}"
                fix = "start again once it can be read, or name another directory"
                raise option_error(self._flag, self._directory, f"{reason}; {fix}") from None
            return _Found(found, problem=one_line(error))

    def _build(self, entry: Path, text: str, build: Callable[[NpyWriter], None], *, replace: bool) -> None:
        self._remove_replaced()
        with tempfile.TemporaryDirectory(prefix=f"{entry.name}.building-", dir=self._directory) as name:
            complete = Path(name) / "entry"
            complete.mkdir()
            files = NpyWriter(complete)
            build(files)
            files.finish()
            write_durably(complete / _MADE_OF, (text + "\n").encode())
            for path in (*complete.iterdir(), complete):
                fsync(path)
            if replace:
                with contextlib.suppress(FileNotFoundError):  # without locks, another process was faster
                    _set_aside(entry)
            _rename_unless_present(complete, entry)
        fsync(self._directory)

    def _remove_replaced(self) -> None:
        """Remove entries that were replaced so long ago that no run has their files open."""
        for path in self._directory.glob(f"*.{_REPLACED}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _REPLACED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class _Found:
    """What is there of an entry: its identity, None if there is nothing; its arrays, or what is wrong."""

    identity: tuple[int, int, int] | None
    arrays: CachedArrays | None = None
    problem: str = ""


def _verified(entry: Path, names: tuple[str, ...]) -> CachedArrays:
    """Return the arrays of an entry. Raises OSError or ValueError if it is not as it was written."""
    verify_arrays(entry, names)
    try:
        return CachedArrays(entry, names)
    except (DamagedFile, OSError):  # it was whole a moment ago
        return CachedArrays(entry, names)


def _set_aside(entry: Path) -> None:
    """Give an entry another name, because other processes may have its files open."""
    replaced = entry.with_name(f"{entry.name}.{_REPLACED}{secrets.token_hex(4)}")
    os.rename(entry, replaced)
    os.utime(replaced)  # its age counts from now


def _rename_unless_present(complete: Path, entry: Path) -> None:
    try:
        os.rename(complete, entry)
    except OSError:
        if not entry.is_dir():  # otherwise another process was faster, and built the same entry
            raise
