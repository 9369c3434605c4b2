"""The digests of a file's chunks in a second file beside it, its sidecar, which has one digest in turn.

A reader that knows the digest of the sidecar can check any chunk of the file: a hash tree of two levels.
docs/internals/checkpoints.md has the format of both, under "Digests".
"""

import hashlib
import operator
from dataclasses import dataclass
from typing import Any

from megatron_zpp.storage.checksums import Checksums, DamagedFile, check_chunk_bytes
from megatron_zpp.storage.files import write_durably
from megatron_zpp.storage.location import Location
from megatron_zpp.storage.regular import UnfitFile, read_limited

_LINE = 65  # bytes: a SHA-256 in hexadecimal, and a newline


@dataclass(frozen=True)
class SidecarDigest:
    """Size of one file, and the digest of the sidecar with the digests of its chunks."""

    size: int
    chunk_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest has of the file."""
        return {"bytes": self.size, "chunk_bytes": self.chunk_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Any, path: Location) -> "SidecarDigest":
        """Return the inverse of `to_json`. Raises DamagedFile naming `path`, the source of the value."""
        try:
            size, chunk_bytes = map(operator.index, (value["bytes"], value["chunk_bytes"]))
            found = cls(size, chunk_bytes, value["sha256"])
            check_chunk_bytes(found.chunk_bytes, path)
        except (KeyError, TypeError) as error:
            raise DamagedFile(f"{path}: not the digest of a file ({error!r})") from None
        return found

    @property
    def sidecar_bytes(self) -> int:
        return _LINE * -(-self.size // self.chunk_bytes)


def sidecar_path(path: Location) -> Location:
    return path.with_name(f"{path.name}.sha256")


def write_sidecar(path: Location, checksums: Checksums) -> SidecarDigest:
    """Write the sidecar of the file `path`, make it durable, and return what a reader must know."""
    content = "".join(f"{digest}\n" for digest in checksums.digests).encode()
    write_durably(sidecar_path(path), content)
    return SidecarDigest(checksums.size, checksums.chunk_bytes, hashlib.sha256(content).hexdigest())


def read_sidecar(path: Location, digest: SidecarDigest) -> Checksums:
    """Return the checksums of the file `path` from its sidecar. Raises DamagedFile if it was changed."""
    sidecar = sidecar_path(path)
    try:
        content = read_limited(sidecar, digest.sidecar_bytes)
    except FileNotFoundError:
        raise DamagedFile(f"{sidecar}: missing") from None
    except UnfitFile as error:
        raise DamagedFile(f"{sidecar}: {error.strerror}") from None
    if len(content) != digest.sidecar_bytes:
        raise DamagedFile(f"{sidecar}: {len(content)} bytes; {digest.sidecar_bytes} were written")
    if hashlib.sha256(content).hexdigest() != digest.sha256:
        raise DamagedFile(
            f"{sidecar}: its SHA-256 is not the one that was written; it is damaged or another file's"
        )
    return Checksums(digest.size, digest.chunk_bytes, tuple(content.decode().split()))
