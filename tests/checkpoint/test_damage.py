"""Every flipped bit, cut and missing file of a checkpoint is found before it is used, and named."""

import hashlib
import json
import random
import re
from pathlib import Path

import pytest

from benchmarks.faults.engines import train
from megatron_zpp.checkpoint.directory import checkpoint_name
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.manifest import MANIFEST, MARKER, write_manifest
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.checkpoint.write import shard_file_name
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import DamagedFile, checksums_of
from tests.checkpoint.saving import SECOND, TOKENIZER, save, small
from tests.support import flipped
from tests.zero.ranks import on_ranks

SHARDS = "rank_00000.safetensors"
FILES = [MARKER, MANIFEST, "state.json", SHARDS, f"{SHARDS}.sha256"]
FLIPS = 150  # of each file


def check(path: Path) -> None:
    """Reads all of a checkpoint, as the ranks of a run do together."""
    with CheckpointReader(path) as reader:
        reader.check_rest(0, 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = small()
    train(engine, seed=2)
    return save(tmp_path_factory.mktemp("checkpoint"), engine)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_every_cut_is_found(checkpoint: Path, name: str) -> None:
    file, draw = checkpoint / name, random.Random(name)
    content = file.read_bytes()
    bits = {0, 8 * len(content) - 1, *draw.sample(range(8 * len(content)), FLIPS)}
    lengths = {0, 1, len(content) - 1, *draw.sample(range(len(content)), 20)}
    blamed = f"{MARKER}|{MANIFEST}" if name == MARKER else f"{name}[: ]"
    changed = [flipped(content, bit) for bit in bits] + [content[:length] for length in lengths]
    try:
        for harmed in (*changed, content + b"\0", None):
            file.unlink()
            if harmed is not None:
                file.write_bytes(harmed)
            with pytest.raises(DamagedFile, match=blamed) as caught:
                check(checkpoint)
            assert "\n" not in str(caught.value)
    finally:
        file.write_bytes(content)
    check(checkpoint)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", "[]"),
        ("state.json", "{}"),
        ("state.json", '{"progress": {"iteration": 1}}'),
        (SHARDS, ""),
        (SHARDS, "\x02\0\0\0\0\0\0\0[]"),
        (SHARDS, "\xff" * 8),
        (SHARDS, "\x02\0\0\0\0\0\0\0{}"),
    ],
)
def test_a_crafted_file_with_right_checksums_is_refused(tmp_path: Path, name: str, text: str) -> None:
    refused(save(tmp_path, small()), name, text.encode("latin-1"), re.escape(name))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "1 ranks are not 0 nodes"),
        ({"ranks": 3, "nodes": 2}, "3 ranks are not 2 nodes"),
        ({"tensor": 1.0}, "groups of 1.0 ranks"),
        ({"ranks": 30}, "does not name the files of 30 ranks"),
        ({"shard_numel": 8}, "unit 0 has no shard 1"),
    ],
    ids=str,
)
def test_ranks_and_shards_that_were_not_saved_are_refused(
    tmp_path: Path, change: dict[str, float], said: str
) -> None:
    path = save(tmp_path, small())
    state = json.loads((path / "state.json").read_text())
    (state["units"][0] if "shard_numel" in change else state).update(change)
    refused(path, "state.json", json.dumps(state).encode(), said)


def refused(path: Path, name: str, content: bytes, said: str) -> None:
    """Damage is found in a checkpoint of which a file has another content, and right checksums."""
    (path / name).write_bytes(content)
    write_manifest(path, {one: checksums_of(path / one) for one in ("state.json", SHARDS)})
    with pytest.raises(DamagedFile, match=said):
        load_checkpoint(path, small(), TOKENIZER, with_optimizer=True)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{}",
        '{"format_version": 6, "files": {"state.json": {"sha256": "", "bytes": 1, "chunk_bytes": 65536}}}',
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
    rewrite(path, json.dumps(manifest | {"format_version": 12}))
    with pytest.raises(
        ValueError, match="format version 12; this program reads 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    ):
        check(path)


def save_sharded(topology: Topology, directory: str) -> str:
    engine = small(topology=topology, tensor=2, zero_stage=3)
    first = save(Path(directory), engine)
    train(engine, seed=2)
    save(Path(directory), engine, SECOND)
    return str(first)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two data ranks × two tensor ranks; beside it one of the same run, one step later."""
    return Path(on_ranks(4, save_sharded, str(tmp_path_factory.mktemp("sharded")))[0])


@pytest.mark.parametrize("suffix", ["", ".sha256"])
def test_a_file_of_another_rank_or_checkpoint_is_found(sharded: Path, suffix: str) -> None:
    """Of the same size, and undamaged; alone, or together with the sidecar that belongs to it."""
    other = sharded.parent / checkpoint_name(SECOND.iteration)
    one, two = (shard_file_name(rank) + suffix for rank in (0, 1))
    content = (sharded / one).read_bytes()
    for source in (sharded / two, other / one):
        assert source.stat().st_size == len(content)
        (sharded / one).write_bytes(source.read_bytes())
        with pytest.raises(DamagedFile, match=re.escape(str(sharded / one))):
            check(sharded)
        (sharded / one).write_bytes(content)
    names = (shard_file_name(0), shard_file_name(0) + ".sha256")
    contents = [(sharded / name).read_bytes() for name in names]
    for name in names:
        (sharded / name).write_bytes((other / name).read_bytes())
    with pytest.raises(DamagedFile, match=r"rank_00000\.safetensors\.sha256: .*damaged or another file's"):
        check(sharded)
    for name, content in zip(names, contents, strict=True):
        (sharded / name).write_bytes(content)
    check(sharded)


def test_a_rank_reads_no_sidecars_but_those_of_the_files_that_it_reads(sharded: Path) -> None:
    sidecar = sharded / f"{shard_file_name(1)}.sha256"
    content = sidecar.read_bytes()
    sidecar.unlink()
    try:
        with CheckpointReader(sharded) as reader:
            reader.check_rest(0, 2)
        with (
            CheckpointReader(sharded) as reader,
            pytest.raises(DamagedFile, match=f"{sidecar.name}: missing"),
        ):
            reader.check_rest(1, 2)
    finally:
        sidecar.write_bytes(content)


def rewrite(path: Path, manifest: str) -> None:
    """Replaces the manifest by one with a right marker."""
    (path / MANIFEST).write_text(manifest)
    (path / MARKER).write_text(hashlib.sha256(manifest.encode()).hexdigest() + "\n")
