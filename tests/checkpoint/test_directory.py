"""Which checkpoints there are, which is the newest, which may go."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from megatron_zpp.checkpoint import directory as directory_module
from megatron_zpp.checkpoint.directory import (
    TRACKER,
    candidates,
    committed,
    each_candidate,
    lost_newest,
    read_newest,
    remove_leftovers,
    remove_old,
    write_tracker,
)
from megatron_zpp.checkpoint.manifest import MARKER, is_committed
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.location import Location
from tests.checkpoint.saving import save, small


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, engine = tmp_path_factory.mktemp("six"), small()
    for iteration in range(1, 7):
        save(directory, engine, Progress(iteration, iteration))
    return directory


@pytest.fixture
def saved(six: Path, tmp_path: Path) -> Path:
    """A directory with checkpoints of the iterations 1 to 6."""
    shutil.copytree(six, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_newest_comes_first_and_any_can_be_named(saved: Path, tmp_path: Path) -> None:
    assert [path.name for path in candidates(str(saved))] == [f"iter_000000{i}" for i in (6, 5, 4, 3, 2, 1)]
    assert [path.name for path in candidates(str(saved), 2)] == ["iter_0000002"]
    with pytest.raises(ValueError, match=r"--ckpt-step 7: .* iterations there: 1, 2, 3, 4, 5, 6"):
        candidates(str(saved), 7)
    assert candidates(str(tmp_path / "none")) == []


@pytest.mark.parametrize("tracker", [None, "", "garbage", "11", "-5", "5\0", "3"])
def test_the_tracker_is_a_hint_and_is_rebuilt(saved: Path, tracker: str | None) -> None:
    if tracker is None:
        (saved / TRACKER).unlink()
    else:
        (saved / TRACKER).write_text(tracker)
    assert candidates(str(saved))[0].name == "iter_0000006"
    write_tracker(saved)
    assert (saved / TRACKER).read_text() == "6\n"


def test_a_tracker_that_cannot_be_written_fails_no_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the disk full at the last block, behind a checkpoint that is committed."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory_module, "write_text", full)
    save(saved, small(), Progress(7, 7))
    assert max(committed(saved)) == 7
    assert (saved / TRACKER).read_text() == "6\n"


def test_an_uncommitted_directory_is_not_a_checkpoint(saved: Path) -> None:
    (saved / "iter_0000006" / MARKER).unlink()
    assert candidates(str(saved))[0].name == "iter_0000005"
    for path in committed(saved).values():
        (path / MARKER).unlink()
    with pytest.raises(ValueError, match=f"--load .*: iter_0000001 has no {MARKER}"):
        candidates(str(saved))


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"), [(2, None, [5, 6]), (1, 2, [2, 4, 6]), (6, None, [1, 2, 3, 4, 5, 6])]
)
def test_old_checkpoints_are_removed(
    saved: Path, keep_last: int, keep_every: int | None, left: list[int]
) -> None:
    remove_old(saved, keep_last, keep_every, newest=saved / "iter_0000006")
    assert names(saved) == [*(f"iter_{iteration:07d}" for iteration in left), TRACKER]


def test_of_a_linked_checkpoint_the_link_alone_is_removed(saved: Path, tmp_path: Path) -> None:
    """Somebody has moved it to another disk, and keeps it there."""
    elsewhere = tmp_path / "archive"
    shutil.move(saved / "iter_0000005", elsewhere)
    (saved / "iter_0000005").symlink_to(elsewhere)
    remove_old(saved, 1, None, newest=saved / "iter_0000006")
    assert names(saved) == ["archive", "iter_0000006", TRACKER]
    assert is_committed(elsewhere)


def test_a_checkpoint_that_was_being_replaced_is_found(saved: Path) -> None:
    (saved / "iter_0000006").rename(saved / "iter_0000006.retired")
    assert candidates(str(saved))[0].name == "iter_0000006.retired"
    remove_leftovers(saved)
    assert candidates(str(saved))[0].name == "iter_0000006.retired"
    save(saved, small(), Progress(6, 6))
    remove_leftovers(saved)
    assert candidates(str(saved))[0].name == "iter_0000006"
    assert not (saved / "iter_0000006.retired").exists()


def test_a_removal_that_is_cut_is_finished_by_the_next_save(saved: Path) -> None:
    """A kill after the first file is gone leaves no checkpoint without it, and no directory forever."""

    def killed() -> None:
        raise SystemExit("killed")

    with pytest.raises(SystemExit, match="killed"):
        remove_old(saved, 1, None, newest=saved / "iter_0000006", on_progress=killed)
    assert list(committed(saved)) == [6, 4, 3, 2, 1]
    remove_leftovers(saved)
    assert not list(saved.glob("iter_0000005*"))


def test_damage_is_passed_over_and_a_removal_looked_up_again(saved: Path) -> None:
    asked: list[str] = []

    def read(path: Location) -> str:
        asked.append(path.name)
        if path.name == "iter_0000006":
            raise DamagedFile("damaged")
        if path.name == "iter_0000005":
            (saved / "iter_0000005").rename(saved / "iter_0000005.partial")
            raise FileNotFoundError
        return path.name

    find = partial(each_candidate, str(saved))
    assert read_newest(find, read, lambda error: isinstance(error, DamagedFile)) == "iter_0000004"
    assert asked == [f"iter_000000{iteration}" for iteration in (6, 5, 6, 4)]
    with pytest.raises(DamagedFile):  # of a checkpoint that is there
        read_newest(find, read)
    assert read_newest(lambda: [], read) is None


def test_checkpoints_that_always_vanish_end_in_one_line(saved: Path) -> None:
    def read(path: Path) -> None:
        path.rename(saved / f"iter_{int(path.name[5:]) + 1:07d}")
        raise FileNotFoundError

    with pytest.raises(ValueError, match="was removed while it was read, as were 19 before it; raise the"):
        read_newest(lambda: each_candidate(str(saved)), read)


@pytest.fixture
def rotated_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Iteration 5 alone; at the first look for its marker a run saves iteration 6 and removes 5."""
    remove_old(saved, 2, None, newest=saved / "iter_0000006")
    (saved / "iter_0000006").rename(saved / "later")
    write_tracker(saved)
    looks: list[Location] = []

    def rotated(path: Path) -> bool:
        looks.append(path)
        if len(looks) == 1:
            (saved / "later").rename(saved / "iter_0000006")
            (saved / "iter_0000005").rename(saved / "iter_0000005.partial")
            (saved / TRACKER).write_text("6\n")
        return is_committed(path)

    monkeypatch.setattr(directory_module, "is_committed", rotated)
    return saved


def test_a_checkpoint_that_vanishes_while_it_is_looked_up_is_no_damage(rotated_once: Path) -> None:
    """After the list of the directory, and before the look for its marker."""
    assert [path.name for path in candidates(str(rotated_once))] == ["iter_0000006"]


def test_a_tracker_that_changes_meanwhile_warns_of_nothing(rotated_once: Path) -> None:
    assert lost_newest(rotated_once) is None


@pytest.mark.parametrize(
    ("named", "lost"), [("0", True), ("7", True), ("6", False), ("-1", False), ("x", False)]
)
def test_a_checkpoint_that_the_tracker_names_is_missed(saved: Path, named: str, lost: bool) -> None:
    """Also that of iteration 0, as imports have."""
    (saved / TRACKER).write_text(named)
    said = f"{saved}/iter_{int(named):07d}, which {TRACKER} names, is not there" if lost else None
    assert lost_newest(saved) == said


@pytest.mark.parametrize("named", [None, "0", "6", "x"])
def test_a_directory_whose_checkpoints_are_all_gone_is_not_empty(saved: Path, named: str | None) -> None:
    """A run that found nothing there would start from initial weights."""
    for path in committed(saved).values():
        shutil.rmtree(path)
    (saved / TRACKER).unlink() if named is None else (saved / TRACKER).write_text(named)
    if named not in ("0", "6"):
        assert candidates(str(saved)) == []
        return
    with pytest.raises(ValueError, match=f"iter_000000{named}, which .* is not there, nor is another; bring"):
        candidates(str(saved))


def test_a_named_checkpoint_that_is_replaced_while_it_is_looked_up_is_found(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Location] = []

    def replaced(path: Path) -> bool:
        looks.append(path)
        return len(looks) > 3 and is_committed(path)

    monkeypatch.setattr(directory_module, "is_committed", replaced)
    assert [path.name for path in candidates(str(saved), 4)] == ["iter_0000004"]
