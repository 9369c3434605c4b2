"""The directory of a run in memory: private, locked while in use, and removed a day after its run ended."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_zpp.memory_snapshots.run_memory import RunMemory, room_for, run_directory, snapshots_root

DAY = 24 * 3600


@pytest.fixture
def parent() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


def age(directory: Path, seconds: float) -> None:
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (time.time() - seconds,) * 2)


def test_files_outlive_their_run_and_are_found_by_its_name(parent: str) -> None:
    root = snapshots_root(parent)
    first = RunMemory(root, "first")
    (first.path / "copy").write_bytes(b"states")
    first.close()
    assert snapshots_root(parent) == root
    again = RunMemory(root, "first")
    assert (again.path / "copy").read_bytes() == b"states"
    assert [path.stat().st_mode & 0o777 for path in (root, again.path)] == [0o700, 0o700]
    again.remove()
    again.close()
    assert list(root.iterdir()) == []


def test_only_directories_that_nobody_has_used_for_a_day_are_removed(parent: str) -> None:
    root = snapshots_root(parent)
    for name, seconds in (("old", DAY + 60), ("young", DAY - 60)):
        left = RunMemory(root, name)
        left.close()
        age(left.path, seconds)
    used = RunMemory(root, "used")
    age(used.path, DAY + 60)
    RunMemory(root, "new").close()
    assert {path.name for path in root.iterdir()} == {"young", "used", "new"}
    used.close()
    RunMemory(root, "new").close()
    assert {path.name for path in root.iterdir()} == {"young", "new"}


def test_a_directory_without_a_lock_is_removed_a_day_after_it_was_found(parent: str) -> None:
    """A rank that was killed between two calls, or that wrote while its run ended, can leave one."""
    root = snapshots_root(parent)
    (root / "left").mkdir(parents=True)
    root.chmod(0o700)
    (root / "left" / "copy").write_bytes(b"states")
    age(root / "left", 2 * DAY)
    for there in (True, False):
        RunMemory(root, "another").close()
        assert (root / "left").exists() == there
        if there:
            age(root / "left", 2 * DAY)


@pytest.mark.parametrize("spoil", ["others", "link", "file"])
def test_a_directory_that_is_not_this_users_alone_is_refused(parent: str, spoil: str) -> None:
    root = snapshots_root(parent)
    if spoil == "others":
        root.mkdir()
        root.chmod(0o755)
    elif spoil == "link":
        root.symlink_to(parent)
    else:
        root.touch()
    with pytest.raises(ValueError, match="is not a directory of yours alone"):
        snapshots_root(parent)


@pytest.mark.parametrize("which", ["root", "run"])
@pytest.mark.parametrize("spoil", ["others", "link", "file"])
def test_directories_are_examined_again_at_each_open(parent: str, which: str, spoil: str) -> None:
    """After `snapshots_root`, or between two starts: what a link names is neither read nor written."""
    root, elsewhere = snapshots_root(parent), Path(parent) / "elsewhere"
    RunMemory(root, "run").close()
    found, kept = (root if which == "root" else root / "run"), Path(parent) / "kept"
    found.rename(kept)
    if spoil == "others":
        kept.rename(found)
        found.chmod(0o750)
    elif spoil == "link":
        elsewhere.mkdir(mode=0o755)
        found.symlink_to(elsewhere)
    else:
        found.touch()
    with pytest.raises(
        OSError, match=f"^{found} is not a directory of yours alone \\(mode 0700\\); remove it"
    ):
        RunMemory(root, "run")
    with pytest.raises(OSError, match="is not a directory of yours alone"):
        run_directory(root, "run")
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


def test_a_planted_link_is_no_lock(parent: str) -> None:
    root, target = snapshots_root(parent), Path(parent) / "target"
    memory = RunMemory(root, "run")
    (memory.path / "lock").unlink()
    (memory.path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="lock"):
        RunMemory(root, "run")
    memory.close()
    assert not target.exists()


def test_what_is_not_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is on proc; must be in memory, on tmpfs"):
        snapshots_root("/proc")
    with pytest.raises(ValueError, match="No such file or directory; name a directory in memory"):
        snapshots_root("/dev/shm/not/there")


def test_a_runs_own_files_count_as_room(parent: str) -> None:
    root = snapshots_root(parent)
    memory, size = RunMemory(root, "run"), 8 << 20
    (memory.path / "copy").write_bytes(bytes(size))
    (memory.path / "again").hardlink_to(memory.path / "copy")  # counts once
    # Other programs use memory meanwhile, so only the difference between two questions is known.
    differences = [room_for(root, "run") - room_for(root, None) for _ in range(5)]
    assert any(abs(difference - size) < size // 2 for difference in differences)
    memory.close()
