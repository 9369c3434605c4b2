"""Sidecars: what they contain, by other programs' sums, and every change to one is found."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_zpp.storage.checksums import DamagedFile, checksums_of
from megatron_zpp.storage.sidecar import SidecarDigest, read_sidecar, sidecar_path, write_sidecar

CHUNK = 64 << 10  # the smallest that is read


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, SidecarDigest]:
    """A file of three chunks, the last one short, with its sidecar."""
    path = tmp_path / "shards"
    path.write_bytes(os.urandom(2 * CHUNK + 5))
    return path, write_sidecar(path, checksums_of(path, CHUNK))


def test_it_is_what_stock_programs_compute(file: tuple[Path, SidecarDigest]) -> None:
    path, digest = file
    command = ["split", "-b", str(CHUNK), "--filter", "sha256sum | cut -c -64", str(path)]
    sums = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert sidecar_path(path) == path.with_name("shards.sha256")
    assert sidecar_path(path).read_bytes() == sums
    assert digest.to_json() == {
        "bytes": 2 * CHUNK + 5,
        "chunk_bytes": CHUNK,
        "sha256": hashlib.sha256(sums).hexdigest(),
    }
    assert SidecarDigest.from_json(digest.to_json(), path) == digest
    assert read_sidecar(path, digest) == checksums_of(path, CHUNK)


def test_an_empty_file_has_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    digest = write_sidecar(tmp_path / "empty", checksums_of(tmp_path / "empty"))
    assert sidecar_path(tmp_path / "empty").read_bytes() == b""
    assert read_sidecar(tmp_path / "empty", digest).digests == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"g" + content[1:], "its SHA-256 is not the one that was written"),
        (lambda content: content[:-1], "194 bytes; 195 were written$"),
        (lambda content: content + b"\n", "is longer than 195 bytes$"),
    ],
)
def test_a_change_is_found_and_said(
    file: tuple[Path, SidecarDigest], change: Callable[[bytes], bytes], said: str
) -> None:
    path, digest = file
    sidecar = sidecar_path(path)
    sidecar.write_bytes(change(sidecar.read_bytes()))
    with pytest.raises(DamagedFile, match=f"^{sidecar}: {said}"):
        read_sidecar(path, digest)
    sidecar.unlink()
    with pytest.raises(DamagedFile, match=f"^{sidecar}: missing$"):
        read_sidecar(path, digest)
    os.mkfifo(sidecar)
    with pytest.raises(DamagedFile, match=f"^{sidecar}: is a FIFO"):
        read_sidecar(path, digest)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"bytes": 1, "sha256": "a" * 64},
        {"bytes": 1.0, "chunk_bytes": CHUNK, "sha256": "a" * 64},
        {"bytes": 1, "chunk_bytes": "65536", "sha256": "a" * 64},
        {"bytes": 1, "chunk_bytes": 0, "sha256": "a" * 64},
    ],
)
def test_refuses_what_is_no_digest_of_a_file(value: object) -> None:
    with pytest.raises(DamagedFile, match=r"^manifest: "):
        SidecarDigest.from_json(value, Path("manifest"))
