"""The file in --save by which a restarted run finds its memory snapshots."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.memory_snapshots.copies import SnapshotName
from megatron_zpp.memory_snapshots.name import checked_name, memory_name, write_memory_name
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.train.memory_snapshots import open_memory
from megatron_zpp.train.setup.ranks import Ranks
from tests.train.conftest import BYTES, TINY

FILE = "memory_snapshots.txt"
OLD = "0123456789abcdef 9f9f5111\n"  # as versions before wrote it, with the first digits of its SHA-256


def test_a_start_finds_what_the_one_before_wrote(tmp_path: Path) -> None:
    assert memory_name(str(tmp_path)) == (None, [])
    name = write_memory_name(str(tmp_path), None)
    assert memory_name(str(tmp_path)) == (name, [])
    assert write_memory_name(str(tmp_path), name) == name
    (tmp_path / FILE).unlink()
    assert memory_name(str(tmp_path)) == (None, [])
    assert write_memory_name(str(tmp_path), None) != name
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_start_without_memory_snapshots_forgets_those_of_earlier_starts(tmp_path: Path) -> None:
    """They would hold later states than the next start with them continues."""
    name = write_memory_name(str(tmp_path), None)
    flags = ["--mock-data", *BYTES, *TINY, "--train-iters", "1", "--save", str(tmp_path)]
    ranks = Ranks(
        topology=Topology(1, 2, 1, 2), store=dist.HashStore(), signals=StopSignals(), activity=Activity()
    )
    for rank, found in ((1, name), (0, None)):
        ranks = replace(ranks, topology=Topology(rank, 2, rank, 2))
        assert open_memory(parse_args(flags), Mock(), ranks) == (None, [])
        assert memory_name(str(tmp_path)) == (found, [])


def test_a_moved_directory_keeps_its_name_and_a_copy_gets_its_own(tmp_path: Path) -> None:
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    name = write_memory_name(str(run), None)
    shutil.copytree(run, copy)
    assert memory_name(str(copy)) == (
        None,
        [
            f" {FILE} in {copy} was written in another directory, {run}: the memory snapshots of that run "
            "are not used"
        ],
    )
    own = write_memory_name(str(copy), None)
    assert memory_name(str(copy)) == (own, [])
    os.rename(run, moved)
    assert memory_name(str(moved)) == (name, [])
    assert own != name


def test_a_file_of_an_earlier_version_is_read_until_the_next_start_is_copied(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    (run / FILE).write_text(OLD)
    assert memory_name(str(run)) == ("0123456789abcdef", [])
    write_memory_name(str(run), "0123456789abcdef")
    shutil.copytree(run, copy)
    assert memory_name(str(copy))[0] is None


def test_a_path_with_any_characters_is_kept(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b'\xff\n\xe6\x97\xa5 "run"')
    run.mkdir()
    name = write_memory_name(str(run), None)
    assert memory_name(str(run)) == (name, [])


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"0" * 100_000, OLD[:-1].encode(), b"../../../../../.. 16b2aec7\n"]
)
def test_anything_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DamagedFile, match=r"memory_snapshots.txt there says .*; remove it to resume without"):
        memory_name(str(tmp_path))


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    write_memory_name(str(tmp_path), None)
    content = (tmp_path / FILE).read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 4
        (tmp_path / FILE).write_bytes(changed)
        with pytest.raises(DamagedFile):
            memory_name(str(tmp_path))


@pytest.mark.parametrize("sent", ["..", "../0123456789abcdef", "0123456789abcdef/..", "", 7, None, ["a"]])
def test_what_another_rank_sends_is_a_name_or_an_error(sent: object) -> None:
    """Because it becomes a part of paths."""
    with pytest.raises(ValueError, match="a rank sent what is no name of memory snapshots"):
        checked_name(sent)
    for fields in ((0, sent), (sent, "01234567") if sent != 7 else (-7, "01234567")):
        with pytest.raises(ValueError, match="a rank sent what is no name of a memory snapshot"):
            SnapshotName.checked(*fields)
    assert checked_name("0123456789abcdef") == "0123456789abcdef"
    assert SnapshotName.checked(7, "01234567") == SnapshotName(7, "01234567")
