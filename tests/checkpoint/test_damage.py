"""Every flipped bit, cut and missing file of a checkpoint is found before it is used, and named."""

import json
import random
import re
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.manifest import MANIFEST, MARKER, write_manifest
from megatron_zpp.checkpoint.read import CheckpointReader, load_checkpoint
from megatron_zpp.storage.checksums import CHUNK_BYTES, DamagedFile, checksums_of
from tests.checkpoint.saving import TOKENIZER, save, small, train

FILES = [MARKER, MANIFEST, "state.json", "rank_00000.safetensors"]
FLIPS = 150  # of each file


def check(path: Path) -> None:
    """Reads all of a checkpoint, as the ranks of a run do together."""
    with CheckpointReader(path) as reader:
        reader.check_rest(0, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = small()
    train(engine, 1, seed=2)
    return save(tmp_path_factory.mktemp("checkpoint"), engine)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(checkpoint: Path, name: str) -> None:
    file, draw = checkpoint / name, random.Random(name)
    content = file.read_bytes()
    bits = {0, 8 * len(content) - 1, *draw.sample(range(8 * len(content)), FLIPS)}
    try:
        for bit in bits:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(DamagedFile) as caught:
                check(checkpoint)
            blamed = MANIFEST if name == MARKER else name
            assert blamed in str(caught.value)
            assert "\n" not in str(caught.value)
    finally:
        file.write_bytes(content)
    check(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_found(checkpoint: Path, name: str) -> None:
    file, draw = checkpoint / name, random.Random(name)
    content = file.read_bytes()
    try:
        for length in {0, 1, len(content) - 1, *draw.sample(range(len(content)), 20)}:
            file.write_bytes(content[:length])
            with pytest.raises(DamagedFile, match=MANIFEST if name == MARKER else name):
                check(checkpoint)
        file.write_bytes(content + b"\0")
        with pytest.raises(DamagedFile):
            check(checkpoint)
        file.unlink()
        with pytest.raises(DamagedFile, match=name):
            check(checkpoint)
    finally:
        file.write_bytes(content)
    check(checkpoint)


def test_damage_has_an_offset(checkpoint: Path) -> None:
    file = checkpoint / "rank_00000.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        first = (len(content) - 1) // CHUNK_BYTES * CHUNK_BYTES
        with pytest.raises(DamagedFile, match=f"damaged between bytes {first} and {len(content)}"):
            load_checkpoint(checkpoint, small(), TOKENIZER, with_optimizer=True)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", "[]"),
        ("state.json", "{}"),
        ("state.json", '{"units": [], "ranks": 0}'),
        ("rank_00000.safetensors", ""),
        ("rank_00000.safetensors", "\x02\0\0\0\0\0\0\0[]"),
        ("rank_00000.safetensors", "\xff" * 8),
        ("rank_00000.safetensors", "\x02\0\0\0\0\0\0\0{}"),
    ],
)
def test_a_crafted_file_with_right_checksums_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = save(tmp_path, small())
    (path / name).write_bytes(text.encode("latin-1"))
    files = {one: checksums_of(path / one) for one in ("state.json", "rank_00000.safetensors")}
    write_manifest(path, files)
    with pytest.raises(DamagedFile, match=re.escape(name)):
        load_checkpoint(path, small(), TOKENIZER, with_optimizer=True)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{}",
        '{"format_version": 2, "files": 5}',
        '{"format_version": 2, "files": {}}',
        '{"format_version": 2, "files": {"../x": {}}}',
        '{"format_version": 2, "files": {"state.json": {}}}',
    ],
)
def test_a_crafted_manifest_is_refused_in_a_line(tmp_path: Path, manifest: str) -> None:
    path = save(tmp_path, small())
    rewrite(path, manifest)
    with pytest.raises(DamagedFile, match="manifest"):
        check(path)


def test_an_unknown_format_version_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, small())
    manifest = json.loads((path / MANIFEST).read_text())
    rewrite(path, json.dumps(manifest | {"format_version": 6}))
    with pytest.raises(ValueError, match="format version 6; this program reads 2, 3, 4, 5"):
        check(path)


def rewrite(path: Path, manifest: str) -> None:
    """Replaces the manifest by one with a right marker."""
    import hashlib

    (path / MANIFEST).write_text(manifest)
    (path / MARKER).write_text(hashlib.sha256(manifest.encode()).hexdigest() + "\n")
