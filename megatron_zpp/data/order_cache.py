"""Arrays that are computed once and then read from files by whoever needs them again.

An entry is a directory KEY of one .npy file an array, `checksums.json`, and `made_of.json`, which says what
the key is the digest of. It gets its name when it is whole. Entries may be removed when no run uses them.

An entry is data and not code, and may be shared, as the data set beside which it lies: it gets the
permissions that the umask leaves, and is believed whoever owns it, as far as its checksums agree.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.data.array_files import ArrayFiles, open_array, verify
from megatron_zpp.data.file_array import FileArray
from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.regular import open_stream

_EDGE = 1 << 16  # bytes at either end of a file that its digest covers
_MADE_OF = "made_of.json"


def contents_of(path: str) -> dict[str, Any]:
    """What tells a file from another or a later one: its size, its time and a digest of both its ends."""
    digest = hashlib.sha256()
    with open_stream(path) as file:
        status = os.fstat(file.fileno())
        digest.update(file.read(_EDGE))
        file.seek(max(0, status.st_size - _EDGE))
        digest.update(file.read(_EDGE))
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ends": digest.hexdigest()}


class CachedArrays:
    """The arrays of an entry, by name. Pickling keeps the path alone: a worker process opens the files again.

    Raises OSError and ValueError when they cannot be read.
    """

    def __init__(self, entry: Path, names: tuple[str, ...]) -> None:
        self._entry, self._names = entry, names
        self._arrays = {name: open_array(entry, name) for name in names}

    def __getitem__(self, name: str) -> FileArray:
        return self._arrays[name]

    def __reduce__(self) -> tuple[type["CachedArrays"], tuple[Path, tuple[str, ...]]]:
        return CachedArrays, (self._entry, self._names)


class OrderCache:
    """The entries of one directory, which is made when there is one to write."""

    def __init__(self, flag: str, shown: str, directory: Path, say: Callable[[str], None]) -> None:
        """`flag` and `shown` name the directory in refusals; `say` gets a line when something is built."""
        self._flag, self._shown, self._directory, self._say = flag, shown, directory, say

    def get(
        self,
        made_of: Mapping[str, Any],
        names: tuple[str, ...],
        build: Callable[[ArrayFiles], None],
        what: str,
    ) -> CachedArrays:
        """The arrays `names`, checked and opened; built first by `build` where there are none.

        Where several processes ask at once one builds and the others wait, as far as the file system has
        locks; without them each builds, and the first to be done is kept. An entry that cannot be read, or
        is not as it was written, is built again. Raises ValueError where the directory cannot be written.
        """
        text = json.dumps(dict(made_of), sort_keys=True, indent=1)
        entry = self._directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        with contextlib.suppress(OSError, ValueError):
            return _whole(entry, names)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with locked(self._directory / "lock"):
                problem = ""
                try:
                    return _whole(entry, names)
                except FileNotFoundError:
                    problem = f": a file of {entry} is missing" if entry.exists() else ""
                except (OSError, ValueError) as error:
                    problem = f": {one_line(error)}"
                self._say(f"building {what}, {f'again{problem}' if problem else f'once; {entry}'}")
                self._build(entry, text, build)
        except OSError as error:
            fix = f"{error.strerror}; name a directory with room that can be written"
            raise option_error(self._flag, self._shown, fix) from None
        return CachedArrays(entry, names)

    def _build(self, entry: Path, text: str, build: Callable[[ArrayFiles], None]) -> None:
        shutil.rmtree(entry, ignore_errors=True)  # what is there cannot be read
        with tempfile.TemporaryDirectory(prefix=f"{entry.name}.building-", dir=self._directory) as name:
            whole = Path(name) / "entry"
            whole.mkdir()
            build(files := ArrayFiles(whole))
            files.finish()
            (whole / _MADE_OF).write_text(text + "\n")
            for path in (*whole.iterdir(), whole):
                fsync(path)
            with contextlib.suppress(FileExistsError):
                _rename(whole, entry)
        fsync(self._directory)


def _whole(entry: Path, names: tuple[str, ...]) -> CachedArrays:
    """Raises OSError or ValueError unless it is as it was written."""
    verify(entry, names)
    return CachedArrays(entry, names)


def _rename(whole: Path, entry: Path) -> None:
    """Raises FileExistsError when another process was faster, which has made the same."""
    try:
        os.rename(whole, entry)
    except OSError:
        if not entry.is_dir():
            raise
        raise FileExistsError(entry) from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The kernel frees the lock when its holder dies, so none is left behind."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # a group may share it
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
