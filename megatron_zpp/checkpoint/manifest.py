"""Writes and reads the manifest, which lists the files of a checkpoint, and the marker, written last.

docs/internals/checkpoints.md has the format and its versions. An entry has the size of the file and the
digest of its sidecar (storage/sidecar.py), which the rank that wrote the file has written; or, of the few
small files that rank 0 writes, the digests of its chunks (storage/checksums.py).

A directory without a marker is not a checkpoint; one whose marker, manifest and files disagree is damaged.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_zpp.storage.checksums import JSON_LIMIT, Checksums, DamagedFile
from megatron_zpp.storage.files import write_durably
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import UnfitFile, is_name, read_limited
from megatron_zpp.storage.sidecar import SidecarDigest

FORMAT_VERSION = 6
BUFFERS_VERSION = 8  # with buffers, or frozen units, which have no moments
FORMS_VERSION = 10  # with states in fewer bytes than fp32
AXES_VERSION = 11  # with units that are not sharded over all data and context ranks
READABLE_VERSIONS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
MANIFEST, MARKER = "manifest.json", "COMMITTED"
Entry = SidecarDigest | Checksums
_MARKER_LIMIT = 65  # bytes: a SHA-256 in hexadecimal, and a newline


def format_version(state: Mapping[str, Any]) -> int:
    """The oldest version of the format that can have the content `state` of state.json."""
    units = state.get("units", ())
    if any("axis" in entry.get("split", ()) for unit in units for entry in unit["parameters"].values()):
        return AXES_VERSION
    if state.get("forms"):
        return FORMS_VERSION
    if state.get("buffers") or any(unit.get("frozen") for unit in units):
        return BUFFERS_VERSION
    return FORMAT_VERSION


def write_manifest(directory: Location, files: Mapping[str, Entry], version: int = FORMAT_VERSION) -> None:
    """Write manifest and marker for files that are durable. Raises OSError if the file system does."""
    described = {name: entry.to_json() for name, entry in files.items()}
    manifest = {"format_version": version, "files": described}
    text = json.dumps(manifest, indent=1) + "\n"
    write_durably(directory / MANIFEST, text.encode())
    write_durably(directory / MARKER, _marker(text.encode()))


def is_committed(directory: Location) -> bool:
    """Whether the directory has a marker; `read_manifest` and reading its files detect damage."""
    return (directory / MARKER).is_file()


def marker_of(directory: Location) -> str | None:
    """The content of the marker, which identifies that of the checkpoint; None without. Raises OSError."""
    try:
        return read_limited(directory / MARKER, _MARKER_LIMIT).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError, UnfitFile):
        return None


def read_manifest(directory: Location) -> dict[str, Entry]:
    """The entries by file name. Raises DamagedFile, and ValueError for an unknown version of the format."""
    path = directory / MANIFEST
    try:
        marker, text = read_limited(directory / MARKER, _MARKER_LIMIT), read_limited(path, JSON_LIMIT)
    except FileNotFoundError as error:
        raise DamagedFile(f"{error.filename}: missing; {directory} is not a whole checkpoint") from None
    except UnfitFile as error:
        raise DamagedFile(f"{error.filename}: {error.strerror}") from None
    if marker != _marker(text):
        raise DamagedFile(f"{path}: not the manifest that {MARKER} was written for; one of them is damaged")
    try:
        manifest = json.loads(text)
        version, files = manifest["format_version"], manifest["files"]
        names = sorted(files.keys())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path}: not the manifest of a checkpoint ({error!r})") from None
    if version not in READABLE_VERSIONS:
        readable = ", ".join(map(str, READABLE_VERSIONS))
        raise ValueError(f"{path}: format version {version}; this program reads {readable}")
    for name in names:
        if not is_name(name):
            raise DamagedFile(f"{path}: names a file outside of the checkpoint: {name!r}")
    return {name: _entry(files[name], path) for name in names}


def _entry(value: Any, path: Location) -> Entry:
    """Raises DamagedFile naming `path` for what is no entry."""
    by_sidecar = isinstance(value, dict) and isinstance(value.get("sha256"), str)
    return SidecarDigest.from_json(value, path) if by_sidecar else Checksums.from_json(value, path)


def _marker(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"
