"""A built library in the cache: installed together with its SHA-256, and verified before it is loaded.

A truncated library kills every process that loads it with SIGBUS, so a library that fails verification is
built again. LIBRARY.sha256 has the format of `sha256sum --check`.
"""

import hashlib
import os
from pathlib import Path

from megatron_zpp.native.cache import OTHERS_WRITE, open_private
from megatron_zpp.storage.files import fsync
from megatron_zpp.storage.regular import open_regular, read_limited

_CHUNK = 1 << 20  # bytes hashed at a time


def problem_of(library: Path) -> str | None:
    """The reason why a library must be built again, in a few words; None if it may be loaded."""
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
    return None if found == expected else "its SHA-256 differs from the saved one"


def install(built: Path, library: Path) -> None:
    """Move `built`, a file of the same file system, to `library`, once all its bytes are on disk.

    A process killed between the two renames leaves a library that fails verification.
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
    while chunk := os.pread(descriptor, _CHUNK, position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()


def _digest_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _described(digest: str, library: Path) -> bytes:
    return f"{digest}  {library.name}\n".encode()
