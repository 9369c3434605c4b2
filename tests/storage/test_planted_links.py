"""Links that another user has planted in a shared directory are not followed by what is written there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.directory import write_tracker
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.files import check_writable, locked, open_shared, write_durably, write_text


def write_checksummed(path: Path) -> None:
    writer = ChecksummedWriter(path)
    writer.write(b"new")
    writer.finish()
    writer.close()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("file", lambda path: write_durably(path, b"new")),
        ("config.yaml.partial", lambda path: write_text(path.with_name("config.yaml"), "new")),
        ("rank_00000.safetensors", write_checksummed),
    ],
)
def test_a_planted_link_is_replaced(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    (shared / name).symlink_to(victim)
    write(shared / name)
    assert victim.read_text() == "mine"
    assert "new" in {path.read_text() for path in shared.iterdir() if not path.is_symlink()}


def test_the_tracker_follows_no_link(tmp_path: Path) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    (shared / "iter_0000003").mkdir(parents=True)
    (shared / "iter_0000003" / "COMMITTED").touch()
    (shared / "latest_checkpointed_iteration.txt.partial").symlink_to(victim)
    write_tracker(shared)
    assert victim.read_text() == "mine"
    assert (shared / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_link_in_place_of_a_shared_file_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "counts").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match=r"[Ss]ymbolic link"):
        os.close(open_shared(tmp_path / "counts"))
    with pytest.raises(OSError, match=r"[Ss]ymbolic link"), locked(tmp_path / "counts"):
        pass
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_probe_follows_no_link(tmp_path: Path) -> None:
    check_writable("--save", str(tmp_path / "new"))
    assert not list(tmp_path.iterdir())
