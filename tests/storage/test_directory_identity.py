"""A directory is recognised where it was moved, and a copy is not taken for it."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_zpp.memory_snapshots import directory_identity
from megatron_zpp.memory_snapshots.directory_identity import DirectoryIdentity
from megatron_zpp.storage.location import location


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_moved_directory_is_the_same(directory: Path, tmp_path: Path) -> None:
    before = DirectoryIdentity.of(directory)
    os.rename(directory, tmp_path / "moved")
    assert before.is_same(DirectoryIdentity.of(tmp_path / "moved"))


def test_a_copy_is_another_one_even_where_the_original_was(directory: Path, tmp_path: Path) -> None:
    before = DirectoryIdentity.of(directory)
    shutil.copytree(directory, tmp_path / "copy")
    assert not before.is_same(DirectoryIdentity.of(tmp_path / "copy"))
    os.rename(directory, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", directory)
    assert not before.is_same(DirectoryIdentity.of(directory))


def test_a_link_and_a_relative_path_are_the_same(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "link", Path("run"), Path("./link/../run")):
        assert DirectoryIdentity.of(path) == DirectoryIdentity.of(directory)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (DirectoryIdentity("/b", 7, 1), True),  # mounted at another path
        (DirectoryIdentity("/a", 7, 2), True),  # after a boot, where the id is made of the device's number
        (DirectoryIdentity("/b", 7, 0), True),  # a server's own directory, and an NFS client's
        (DirectoryIdentity("/b", 7, 2), False),  # on another file system, by chance with the same number
        (DirectoryIdentity("/a", 8, 1), False),  # a copy that took its place
    ],
)
def test_hosts_may_see_a_directory_in_different_ways(other: DirectoryIdentity, same: bool) -> None:
    assert (
        DirectoryIdentity("/a", 7, 1).is_same(other) == other.is_same(DirectoryIdentity("/a", 7, 1)) == same
    )


def test_without_lasting_inode_numbers_the_path_decides(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In object stores, and on FUSE, whose numbers may change from mount to mount."""
    first, second = (DirectoryIdentity.of(location(f"s3://bucket/{name}")) for name in ("a", "b"))
    assert first.is_same(first)
    assert not first.is_same(second)
    monkeypatch.setattr(directory_identity, "kind_of_file_system", lambda path: "fuse.gcsfuse")
    before = DirectoryIdentity.of(directory)
    shutil.rmtree(directory)
    directory.mkdir()
    assert before.is_same(DirectoryIdentity.of(directory))
    assert not before.is_same(DirectoryIdentity.of(tmp_path))
