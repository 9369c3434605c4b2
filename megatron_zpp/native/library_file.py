"""A built library in the cache: installed with its SHA-256 beside it, and verified before it is loaded.

A truncated library kills the process that loads it with SIGBUS, at every start; one that does not verify is
built again instead. LIBRARY.sha256 has the form that `sha256sum --check` reads.
"""

import hashlib
import os
from pathlib import Path

from megatron_zpp.native.cache import OTHERS_WRITE, open_private
from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.regular import open_regular, read_limited

_PIECE = 1 << 20  # bytes hashed at a time


def problem_of(library: Path) -> str | None:
    """Why a library must be built, in a few words; None where it may be loaded."""
    try:
        descriptor = open_regular(library)
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if library.is_symlink():
            return "it is a symbolic link"
        if status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid}"
        if status.st_mode & OTHERS_WRITE:
            return "others can write to it"
        expected = _described(_digest_of(file.fileno()), library)
    try:
        found = read_limited(_digest_path(library), len(expected))
    except OSError as error:
        return f"its SHA-256 cannot be read ({error.strerror})"
    return None if found == expected else "its SHA-256 is not the one that was written"


def install(built: Path, library: Path) -> None:
    """Makes `built`, in the same file system, the library; on disk before it gets its name.

    A kill between the two renames leaves a library that does not verify.
    """
    descriptor = open_regular(built)
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
        content = _described(_digest_of(descriptor), library)
    finally:
        os.close(descriptor)
    partial = built.with_name(f"{library.name}.sha256.partial")
    with os.fdopen(open_private(partial, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, _digest_path(library))
    os.replace(built, library)
    fsync(library.parent)


def _digest_of(descriptor: int) -> str:
    digest, position = hashlib.sha256(), 0
    while piece := os.pread(descriptor, _PIECE, position):
        digest.update(piece)
        position += len(piece)
    return digest.hexdigest()


def _digest_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _described(digest: str, library: Path) -> bytes:
    return f"{digest}  {library.name}\n".encode()
