"""The checkpoints of a run side by side: DIRECTORY/iter_0000100 and so on. Which there are, which may go.

`latest_checkpointed_iteration.txt` beside them says the newest, for people and for Megatron's tools. It is a
hint: what is there is what is committed.
"""

import os
import re
import shutil
from pathlib import Path

from megatron_zpp.checkpoint.manifest import MARKER, is_committed
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.regular import read_limited

TRACKER = "latest_checkpointed_iteration.txt"
_TRACKER_LIMIT = 32  # bytes
_NAME = re.compile(r"iter_(\d{7,})(\.retired)?")


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return directory / f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """The iteration that the name of a checkpoint says; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def partial_path(final: Path) -> Path:
    """Where it lies until it is committed."""
    return final.with_name(f"{final.name}.partial")


def retired_path(final: Path) -> Path:
    """Where its predecessor of the same iteration lies while the names change."""
    return final.with_name(f"{final.name}.retired")


def committed(directory: Path) -> dict[int, Path]:
    """The committed checkpoints by iteration, the newest first."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("iter_*")):  # a name sorts before the same one with .retired
        iteration = iteration_of(path)
        if iteration is not None and is_committed(path):
            found.setdefault(iteration, path)
    return dict(sorted(found.items(), reverse=True))


def candidates(directory: str, iteration: int | None = None, flag: str = "--load") -> list[Path]:
    """The committed checkpoints, the newest first, or that of `iteration` alone; none in an empty directory.

    `flag` is what named the directory.

    Raises ValueError for an iteration that is not there, and when no checkpoint that is there was committed.
    """
    root = Path(directory)
    try:
        if root.exists():
            os.listdir(root)  # or a directory that cannot be read would pass for an empty one
        there = committed(root)
    except OSError as error:
        raise option_error(flag, directory, f"{one_line(error)}; name a directory that can be read") from None
    if iteration is not None:
        if iteration not in there:
            shown = ", ".join(map(str, sorted(there))) or "none"
            raise option_error("--ckpt-step", iteration, f"not in {directory}; iterations there: {shown}")
        return [there[iteration]]
    if not there:
        for path in sorted(root.glob("iter_*")):
            if iteration_of(path) is not None:
                problem = f"{path.name} has no {MARKER}: it is damaged or not of this program"
                raise option_error(flag, directory, f"{problem}; name another directory, or remove it")
    return list(there.values())


def lost_newest(directory: Path) -> str | None:
    """What became of the checkpoint that the tracker names, in words; None if it is committed.

    A tracker that is missing or names no iteration says nothing.
    """
    try:
        named = int(read_limited(directory / TRACKER, _TRACKER_LIMIT))
    except (OSError, ValueError):
        return None
    path = checkpoint_path(directory, named)
    if named < 0 or named in committed(directory):
        return None
    gone = f"has no {MARKER}, so it is not whole" if path.exists() else "is not there"
    return f"{path}, which {TRACKER} names, {gone}"


def write_tracker(directory: Path) -> None:
    """Makes the tracker name the newest committed checkpoint. Raises OSError as the file system does."""
    newest = next(iter(committed(directory)), None)
    path = directory / TRACKER
    text = f"{newest}\n"
    if newest is not None and not _holds(path, text.encode()):
        write_text(path, text)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_limited(path, len(content)) == content
    except OSError:
        return False


def remove_leftovers(directory: Path) -> None:
    """Removes what killed saves left, and replaced checkpoints whose successors stand."""
    for path in directory.glob("iter_*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob("iter_*.retired"):
        if is_committed(path.with_suffix("")):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(directory: Path, keep_last: int, keep_every: int | None, *, newest: Path) -> None:
    """Removes committed checkpoints but the last `keep_last`, `newest`, and multiples of `keep_every`.

    `newest` was just saved, and need not be of the last iteration, where a run went back to an earlier one.
    The marker goes first: what a kill leaves is no checkpoint. Raises OSError as the file system does.
    """
    for iteration, path in list(committed(directory).items())[keep_last:]:
        if path != newest and not (keep_every and iteration % keep_every == 0):
            (path / MARKER).unlink()
            shutil.rmtree(path, ignore_errors=True)
