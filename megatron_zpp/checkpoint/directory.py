"""The directory of a run's checkpoints, DIRECTORY/iter_0000100 and so on: finds them, and removes old ones.

It may be a directory of an object store; object_saves.py has what differs there.

`latest_checkpointed_iteration.txt` names the newest, for people and for Megatron's tools. It is only a hint:
the marker in each checkpoint decides whether the checkpoint is committed.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megatron_zpp.checkpoint.manifest import MARKER, is_committed
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.storage.checksums import OnProgress, no_report
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.location import AnyLocation, Location, location
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.regular import read_limited

TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_LIMIT = 32  # bytes
_NAME = re.compile(r"iter_(\d{7,})(\.retired|\.replacement)?")
# Of a checkpoint until it is committed; one that is replaced, while both are renamed; one in an object store,
# where nothing can be renamed, that is to replace another: see object_saves.py.
PARTIAL, RETIRED, REPLACEMENT = ".partial", ".retired", ".replacement"
_SUFFIXES = ("", REPLACEMENT, RETIRED)  # in the order in which they count
LOOKUPS = 20  # for a checkpoint that is not removed while it is read
_Read = TypeVar("_Read")


def checkpoint_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iteration_of(path: Location) -> int | None:
    """The iteration in the name of a checkpoint; None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def named_checkpoint(directory: Location, name: Any) -> Location:
    """The path of a checkpoint in `directory` that another rank named. Raises ValueError for other names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a rank sent what is no name of a checkpoint: {name!r}")
    return directory / name


def aside(final: AnyLocation, suffix: str) -> AnyLocation:
    """The path of another directory, or sign, of the iteration of `final`, by one of the suffixes above."""
    return final.with_name(f"{final.name}{suffix}")


def places_of(final: Location) -> list[Location]:
    """The directories to which a save of a checkpoint may write."""
    return [aside(final, PARTIAL)] if isinstance(final, Path) else [final, aside(final, REPLACEMENT)]


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
    return _newest_of(directory.glob("iter_*"))


def _newest_of(entries: Iterable[Location]) -> Iterator[Location]:
    found: dict[int, list[Location]] = {}
    for path in sorted(entries):  # a name sorts before the same name with .retired or .replacement
        if (iteration := iteration_of(path)) is not None:
            found.setdefault(iteration, []).append(path)
    for _, paths in sorted(found.items(), reverse=True):
        yield from islice(filter(is_committed, paths), 1)


def committed_of(directory: Location, iteration: int) -> Location | None:
    """The committed checkpoint of an iteration, without listing the directory. Raises OSError as above."""
    name = checkpoint_name(iteration)
    return next(filter(is_committed, (directory / f"{name}{suffix}" for suffix in _SUFFIXES)), None)


def _was_finished(path: Location, entries: Collection[Location]) -> bool:
    """Whether `path` of a list of entries was a whole checkpoint when they were listed, or is damaged."""
    if iteration_of(path) is None:
        return False
    return isinstance(path, Path) or aside(path, PARTIAL) not in entries


def _is_uncommitted(path: Location) -> bool:
    """Whether `path`, which had no marker a moment ago, is there without one: it was not just removed.

    In an object store, what a save has begun and not committed is none.
    """
    unfinished = not isinstance(path, Path) and aside(path, PARTIAL).is_file()
    return path.exists() and not unfinished and not is_committed(path)


def candidates(directory: str, iteration: int | None = None, flag: str = "--load") -> list[Location]:
    """All that `each_candidate` yields."""
    return list(each_candidate(directory, iteration, flag))


def read_newest(
    find: Callable[[], Iterable[Location]],
    read: Callable[[Location], _Read],
    passes_over: Callable[[Exception], bool] = lambda error: False,
) -> _Read | None:
    """Return what `read` returns of the first checkpoint that `find` yields; None if it yields none.

    Checkpoints of which `read` raises an error that `passes_over` accepts are passed over; if that leaves
    none, the first such error is raised. Other errors of `read` are raised.

    A run with --keep-last may remove a checkpoint while it is read. Whatever `read` raises then, `find` is
    called again, because that run has saved a newer one. Raises ValueError after LOOKUPS such times.
    """
    for _ in range(LOOKUPS):
        problem: Exception | None = None
        for path in find():
            try:
                return read(path)
            except Exception as error:
                if not is_committed(path):
                    gone = path
                    break
                if not passes_over(error):
                    raise
                problem = problem or error
        else:
            if problem is not None:
                raise problem
            return None
    raise removed_too_often(gone)


def removed_too_often(path: Location) -> ValueError:
    """The error of a reader from which the last of LOOKUPS checkpoints, `path`, was removed as well."""
    return ValueError(
        f"{path}: was removed while it was read, as were {LOOKUPS - 1} before it; raise the --keep-last of "
        "the run that saves them"
    )


def each_candidate(directory: str, iteration: int | None = None, flag: str = "--load") -> Iterator[Location]:
    """Yield the committed checkpoints, newest first, or only that of `iteration`; none of an empty directory.

    Who needs the newest alone does not ask for the marker of each. `flag` named the directory. Raises
    ValueError, before the first, if `iteration` is missing, if another program wrote what is there, if the
    directory is itself a checkpoint, if there are checkpoints but none is committed, and if there is none but
    the tracker names one.
    """
    try:
        root = location(directory)
    except ValueError as error:
        raise option_error(flag, directory, str(error)) from None
    there: dict[int, Location] = {}
    uncommitted: Location | None = None
    try:
        if isinstance(root, Path) and root.exists():
            os.listdir(root)  # `glob` would take an unreadable directory for an empty one
        _refuse_checkpoint(flag, directory, root)
        if iteration is not None:
            there = {} if (found := committed_of(root, iteration)) else committed(root)
            if found := found or there.get(iteration):  # it may have been replaced meanwhile
                yield found
                return
        else:
            for _ in range(LOOKUPS):
                entries: list[Location] = sorted(root.glob("iter_*"))
                any_there = False
                for path in _newest_of(entries):
                    any_there = True
                    yield path
                if any_there:
                    return
                finished = [path for path in entries if _was_finished(path, entries)]
                uncommitted = next(filter(_is_uncommitted, finished), None)
                if uncommitted is not None or not finished:
                    break
            else:
                raise removed_too_often(finished[0])
        foreign = None
        if not there and isinstance(root, Path):
            from megatron_zpp.checkpoint.foreign.recognise import recognise

            foreign = recognise(root)
        lost = lost_newest(root)
    except ObjectError as error:
        raise option_error(flag, directory, f"{error.strerror}") from None
    except OSError as error:
        raise option_error(flag, directory, f"{one_line(error)}; name a directory that can be read") from None
    if foreign:
        raise option_error(flag, directory, f"{foreign.words}; {foreign.remedy}")
    if iteration is not None:
        shown = ", ".join(map(str, sorted(there))) or "none"
        raise option_error("--ckpt-step", iteration, f"not in {directory}; iterations there: {shown}")
    if uncommitted is not None:
        problem = f"{uncommitted.name} has no {MARKER}: it is damaged, or another program wrote it"
        raise option_error(flag, directory, f"{problem}; name another directory, or remove it")
    if lost:
        fix = f"nor is another; bring it back, or remove {TRACKER} to start from the beginning"
        raise option_error(flag, directory, f"{lost}, {fix}")


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
    named = _tracked(directory)
    if named is None or named < 0 or committed_of(directory, named) or _tracked(directory) != named:
        return None  # a tracker that has just changed named a checkpoint that a newer one replaced
    path = directory / checkpoint_name(named)
    gone = f"has no {MARKER}, so it is not whole" if path.exists() else "is not there"
    return f"{path}, which {TRACKER} names, {gone}"


def older_named(directory: Location, loaded: Location) -> str | None:
    """What to say if the tracker names an earlier iteration than that of `loaded`; else None.

    Megatron-LM loads what the tracker names, so somebody may have written there to go back.
    """
    named, newest = _tracked(directory), iteration_of(loaded)
    if named is None or newest is None or not 0 <= named < newest:
        return None
    return f"{TRACKER} names iteration {named}; the newest counts, and --ckpt-step {named} loads that one"


def _tracked(directory: Location) -> int | None:
    try:
        return int(read_limited(directory / TRACKER, _TRACKER_LIMIT))
    except (OSError, ValueError):
        return None


def write_tracker(directory: Location) -> None:
    """Write the newest committed iteration to the tracker, if there is one.

    The tracker is a hint for people and other programs. So an error of the file system leaves it as it is,
    and fails neither the checkpoint that has just been committed nor a start.
    """
    with contextlib.suppress(OSError):
        if newest := next(newest_first(directory), None):
            write_text(directory / TRACKER, f"{iteration_of(newest)}\n")


def remove_leftovers(directory: Path) -> None:
    """Remove the partial checkpoints of killed saves, and replaced ones whose successors are committed."""
    for path in directory.glob("iter_*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob("iter_*.retired"):
        if is_committed(path.with_suffix("")):
            shutil.rmtree(path, ignore_errors=True)


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
    if not isinstance(path, Path):
        unfinished = aside(path, PARTIAL)
        unfinished.write(b"")
        (path / MARKER).unlink()
        path.remove_tree()
        unfinished.unlink()
    elif path.is_symlink():
        path.unlink()  # what it leads to may be somebody's archive
    else:
        doomed = aside(path, PARTIAL)
        os.replace(path, doomed)
        for file in doomed.iterdir():  # one by one, because thousands of files may outlast a time-out
            with contextlib.suppress(OSError):
                file.unlink()
            on_progress()
        shutil.rmtree(doomed, ignore_errors=True)
