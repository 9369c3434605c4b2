"""The directory of a run's checkpoints, DIRECTORY/iter_0000100 and so on: finds them, and removes old ones.

It may be a directory of an object store; object_saves.py has what differs there.

`latest_checkpointed_iteration.txt` names the newest, for people and for Megatron's tools. It is only a hint:
the marker in each checkpoint decides whether the checkpoint is committed.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megatron_zpp.checkpoint.foreign.recognise import recognise
from megatron_zpp.checkpoint.manifest import MARKER, is_committed
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.storage.checksums import DamagedFile, OnProgress, no_report
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.object_path import AnyLocation, Location, ObjectPath, location
from megatron_zpp.storage.object_store import ObjectError
from megatron_zpp.storage.regular import read_limited

TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_LIMIT = 32  # bytes
_NAME = re.compile(r"iter_(\d{7,})(\.retired|\.replacement)?")
_SUFFIXES = ("", ".replacement", ".retired")  # in the order in which they count
_Read = TypeVar("_Read")


def checkpoint_name(iteration: int) -> str:
    """The name of the checkpoint of an iteration."""
    return f"iter_{iteration:07d}"


def checkpoint_path(directory: AnyLocation, iteration: int) -> AnyLocation:
    """The path of the checkpoint of an iteration."""
    return directory / checkpoint_name(iteration)


def iteration_of(path: Location) -> int | None:
    """The iteration in the name of a checkpoint; None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def named_checkpoint(directory: Location, name: Any) -> Location:
    """The path of a checkpoint in `directory` that another rank named. Raises ValueError for other names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a rank sent what is no name of a checkpoint: {name!r}")
    return directory / name


def partial_path(final: AnyLocation) -> AnyLocation:
    """The path of a checkpoint until it is committed; of an object store, see object_saves.py."""
    return final.with_name(f"{final.name}.partial")


def retired_path(final: AnyLocation) -> AnyLocation:
    """The path of the checkpoint that `final` replaces, while both are renamed."""
    return final.with_name(f"{final.name}.retired")


def replacement_path(final: ObjectPath) -> ObjectPath:
    """The path of a checkpoint in an object store that is to replace `final`, which cannot be renamed."""
    return final.with_name(f"{final.name}.replacement")


def places_of(final: Location) -> list[Location]:
    """The directories to which a save of a checkpoint may write."""
    return [final, replacement_path(final)] if isinstance(final, ObjectPath) else [partial_path(final)]


def committed(directory: Location) -> dict[int, Location]:
    """The committed checkpoints by iteration, the newest first. Raises OSError of an object store.

    In an object store this takes a request per checkpoint; see `newest_first` and `committed_of` for fewer.
    """
    return {
        iteration: path for path in newest_first(directory) if (iteration := iteration_of(path)) is not None
    }


def newest_first(directory: Location) -> Iterator[Location]:
    """Yield the committed checkpoints, looking for the marker of one only when it is asked for.

    The directory is listed once. Raises OSError of an object store.
    """
    found: dict[int, list[Location]] = {}
    for path in _entries(directory):  # a name sorts before the same name with .retired or .replacement
        if (iteration := iteration_of(path)) is not None:
            found.setdefault(iteration, []).append(path)
    for _, paths in sorted(found.items(), reverse=True):
        yield from islice(filter(is_committed, paths), 1)


def committed_of(directory: Location, iteration: int) -> Location | None:
    """The committed checkpoint of an iteration, without listing the directory. Raises OSError as above."""
    name = checkpoint_name(iteration)
    return next(filter(is_committed, (directory / f"{name}{suffix}" for suffix in _SUFFIXES)), None)


def _entries(directory: Location) -> list[Location]:
    """What is called like a checkpoint, in the order of names."""
    if isinstance(directory, ObjectPath):
        return sorted(directory.glob("iter_*"))
    return sorted(directory.glob("iter_*"))


def candidates(directory: str, iteration: int | None = None, flag: str = "--load") -> list[Location]:
    """The committed checkpoints, newest first, or only that of `iteration`; empty for an empty directory.

    `flag` is the flag that named the directory, for errors. Raises ValueError if `iteration` is missing, if
    another program wrote what is there, if the directory is itself a checkpoint, and if there are
    checkpoints but none is committed.
    """
    return list(each_candidate(directory, iteration, flag))


def read_newest(find: Callable[[], Location | None], read: Callable[[Location], _Read]) -> _Read | None:
    """Return what `read` returns of the checkpoint that `find` finds; None if it finds none.

    A run with --keep-last may remove the checkpoint while it is read. Then another one is looked up: the one
    that the run has saved meanwhile. Raises what `find` raises, and what `read` does of one that is there.
    """
    while (path := find()) is not None:
        try:
            return read(path)
        except (DamagedFile, OSError):
            if is_committed(path):
                raise
    return None


def each_candidate(directory: str, iteration: int | None = None, flag: str = "--load") -> Iterator[Location]:
    """Yield `candidates` one by one: who needs the newest alone does not ask for the marker of each.

    Raises ValueError as `candidates` does, before the first.
    """
    try:
        root = location(directory)
    except ValueError as error:
        raise option_error(flag, directory, str(error)) from None
    try:
        if not isinstance(root, ObjectPath) and root.exists():
            os.listdir(root)  # `glob` would take an unreadable directory for an empty one
        _refuse_checkpoint(flag, directory, root)
        if iteration is not None and (path := committed_of(root, iteration)):
            yield path
            return
        there = committed(root) if iteration is not None else {}
        any_there = bool(there)
        if iteration is None:
            for path in newest_first(root):
                any_there = True
                yield path
        foreign = None if any_there or isinstance(root, ObjectPath) else recognise(root)
    except ObjectError as error:
        raise option_error(flag, directory, f"{error.strerror}") from None
    except OSError as error:
        raise option_error(flag, directory, f"{one_line(error)}; name a directory that can be read") from None
    if foreign:
        raise option_error(flag, directory, f"{foreign.words}; {foreign.remedy}")
    if iteration is not None:
        shown = ", ".join(map(str, sorted(there))) or "none"
        raise option_error("--ckpt-step", iteration, f"not in {directory}; iterations there: {shown}")
    if not any_there:
        for path in _entries(root):
            if iteration_of(path) is not None and not is_unfinished(path):
                problem = f"{path.name} has no {MARKER}: it is damaged, or another program wrote it"
                raise option_error(flag, directory, f"{problem}; name another directory, or remove it")


def _refuse_checkpoint(flag: str, directory: str, root: Location) -> None:
    """Raise ValueError if `root` is itself a checkpoint, and not the directory of a run's checkpoints."""
    iteration = iteration_of(root)
    if iteration is not None and root.name == checkpoint_name(iteration) and is_committed(root):
        given = f"{flag} {root.parent}" if flag.startswith("-") else str(root.parent)
        raise option_error(flag, directory, f"is a checkpoint; give {given} --ckpt-step {iteration}")


def lost_newest(directory: Location) -> str | None:
    """Why the checkpoint that the tracker names cannot be loaded, in words; None if it is committed.

    None also if the tracker is missing or names no iteration.
    """
    try:
        named = int(read_limited(directory / TRACKER, _TRACKER_LIMIT))
    except (OSError, ValueError):
        return None
    path = directory / checkpoint_name(named)
    if named < 0 or committed_of(directory, named):
        return None
    gone = f"has no {MARKER}, so it is not whole" if path.exists() else "is not there"
    return f"{path}, which {TRACKER} names, {gone}"


def write_tracker(directory: Location) -> None:
    """Write the newest committed iteration to the tracker, if there is one.

    The tracker is a hint for people and other programs. So an error of the file system leaves it as it is,
    and fails neither the checkpoint that has just been committed nor a start.
    """
    with contextlib.suppress(OSError):
        if newest := next(newest_first(directory), None):
            path, text = directory / TRACKER, f"{iteration_of(newest)}\n"
            if not _holds(path, text.encode()):
                write_text(path, text)


def _holds(path: Location, content: bytes) -> bool:
    try:
        return read_limited(path, len(content)) == content
    except OSError:
        return False


def remove_leftovers(directory: Path) -> None:
    """Remove the partial checkpoints of killed saves, and replaced ones whose successors are committed."""
    for path in directory.glob("iter_*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob("iter_*.retired"):
        if is_committed(path.with_suffix("")):
            shutil.rmtree(path, ignore_errors=True)


def is_unfinished(path: Location) -> bool:
    """Whether `path`, of an object store, was begun by a save that did not commit it. False for others."""
    return isinstance(path, ObjectPath) and partial_path(path).is_file()


def remove_old(
    directory: Location,
    keep_last: int,
    keep_every: int | None,
    *,
    newest: Location,
    on_progress: OnProgress = no_report,
) -> None:
    """Remove committed checkpoints except the last `keep_last`, `newest`, and multiples of `keep_every`.

    `newest` has just been saved. It need not have the highest iteration, if the run resumed from an earlier
    one. No file is read. Raises OSError if the file system does.
    """
    for iteration, path in list(committed(directory).items())[keep_last:]:
        if iteration != iteration_of(newest) and not (keep_every and iteration % keep_every == 0):
            remove_committed(path, on_progress)


def remove_committed(path: Location, on_progress: OnProgress = no_report) -> None:
    """Remove a checkpoint. Raises OSError if the file system does.

    If the removal is cut, by a kill or an error, nobody takes the rest for a checkpoint, and the next save
    removes it.
    """
    if isinstance(path, ObjectPath):
        unfinished = partial_path(path)
        unfinished.write(b"")
        (path / MARKER).unlink()
        path.remove_tree()
        unfinished.unlink()
    else:
        doomed = partial_path(path)
        os.replace(path, doomed)
        for file in doomed.iterdir():  # one by one, because thousands of files may outlast a time-out
            with contextlib.suppress(OSError):
                file.unlink()
            on_progress()
        shutil.rmtree(doomed, ignore_errors=True)
