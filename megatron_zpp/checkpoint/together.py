"""Reads of all ranks together: what one rank finds, all ranks know, and a wait ends in one line on all."""

import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from megatron_zpp.checkpoint.directory import LOOKUPS, candidates, named_checkpoint, removed_too_often
from megatron_zpp.checkpoint.file_worker import FileWorker, Stuck
from megatron_zpp.checkpoint.manifest import is_committed
from megatron_zpp.checkpoint.write import SaveFailed, shard_file_name
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.exchange import Abandoned, Exchange, NoProgress
from megatron_zpp.storage.checksums import DamagedFile, OnProgress, thread_count, verify_file
from megatron_zpp.storage.location import Location, location
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.regular import open_ranges, says_what_is_there
from megatron_zpp.storage.sidecar import SidecarDigest, read_sidecar, sidecar_path

_Read = TypeVar("_Read")


class NotReadBack(SaveFailed):
    """The checkpoint is committed, and damaged, or a rank could not read its file: which one, and why."""


def read_together(
    work: Callable[[OnProgress], Any],
    exchange: Exchange,
    files: FileWorker,
    flag: str,
    value: object,
) -> tuple[Any, str | None]:
    """(what `work` returns on this rank, on all ranks the problem of the first rank that has one, or None).

    A problem is damage, which includes missing files. If a file cannot be read on a rank, or a request to an
    object store failed, all ranks raise ValueError. Other errors of `work` are raised. `flag` and `value` as
    in `bounded`.
    """
    result, problem = None, None
    with bounded(exchange, flag, value):
        try:
            result = files.run(work, exchange)
        except Stuck:
            raise
        except (DamagedFile, OSError) as error:
            problem = _problem_of(error, exchange.topology.rank)
        problem = exchange.first("problem", problem)
    if problem is None:
        return result, None
    if not problem["is_damage"]:
        raise option_error(flag, value, problem["reason"])
    return result, problem["reason"]


def _problem_of(error: DamagedFile | OSError, rank: int) -> dict[str, Any]:
    """What is said of an error, and whether it is damage, so that an older checkpoint may take its place.

    Storage that does not answer says nothing about a checkpoint.
    """
    of_store = isinstance(error, ObjectError)
    if isinstance(error, DamagedFile) or of_store or says_what_is_there(error):
        return {"reason": one_line(error), "is_damage": not of_store}  # a store's error has a remedy
    fix = "start again once it can be read"
    if isinstance(error, PermissionError):
        fix = "let the user of the run read it"
    return {"reason": f"rank {rank} on {platform.node()}: {one_line(error)}; {fix}", "is_damage": False}


@dataclass(frozen=True)
class Found(Generic[_Read]):
    """What was loaded: from where, and which newer checkpoints were passed over, with the damage of each."""

    path: Location
    loaded: _Read
    passed_over: list[tuple[Location, str]]


def load_newest(
    directory: str,
    iteration: int | None,
    load: Callable[[Location, OnProgress], _Read],
    exchange_for: Callable[[str], Exchange],
    files: FileWorker,
    flag: str = "--load",
) -> Found[_Read] | None:
    """Load the newest checkpoint that is whole, or that of `iteration`, on all ranks; None if there is none.

    Raises ValueError when there are some and none is whole: nobody who has trained starts anew unawares.
    """
    paths = _agreed_candidates(directory, iteration, exchange_for("load"), files, flag)
    passed_over: list[tuple[Location, str]] = []
    numbers, removals = count(), 0
    while paths:
        path, number = paths.pop(0), next(numbers)
        exchange = exchange_for(f"load/{number}")
        loaded, problem = read_together(partial(load, path), exchange, files, flag, directory)
        if problem is None:
            return Found(path, loaded, passed_over)
        if _is_removed(path, exchange, files, flag, directory):
            removals += 1
            if removals == LOOKUPS:
                raise removed_too_often(path)
            again = exchange_for(f"load/{number}/again")
            found = _agreed_candidates(directory, iteration, again, files, flag)
            tried = [path for path, _ in passed_over]
            paths = [path for path in found if path not in tried]
            continue
        passed_over.append((path, problem))
    if passed_over:
        problem = passed_over[0][1]
        fix = f"none of its checkpoints is whole: {problem}; omit {flag} to start from new weights"
        raise option_error(flag, directory, fix)
    return None


def _is_removed(path: Location, exchange: Exchange, files: FileWorker, flag: str, directory: str) -> bool:
    """Whether `path`, which could not be read, is no checkpoint any more. All ranks must call it.

    The lease keeps other runs away from --save, but not from the --load of a run that saves elsewhere: the
    run that owns it may remove old checkpoints meanwhile (--keep-last), and has saved newer ones.
    """
    with bounded(exchange, flag, directory):
        if exchange.topology.rank == 0:
            exchange.put("removed", files.run(lambda on_progress: not is_committed(path), exchange))
        return exchange.get("removed")


def _agreed_candidates(
    directory: str, iteration: int | None, exchange: Exchange, files: FileWorker, flag: str = "--load"
) -> list[Location]:
    """The checkpoints that rank 0 sees, because a shared file system may show ranks different ones."""
    with bounded(exchange, flag, directory):
        if exchange.topology.rank == 0:
            found = files.run(lambda on_progress: candidates(directory, iteration, flag), exchange)
            exchange.put("candidates", [path.name for path in found])
        return [named_checkpoint(location(directory), name) for name in exchange.get("candidates")]


def read_back(path: Location, digest: SidecarDigest, exchange: Exchange, files: FileWorker) -> None:
    """Read the checkpoint `path` from the disk, on each rank the file that the rank has just written.

    `digest` is what `write_checkpoint` returned. All ranks return, or all raise the same
    NotReadBack, also if no rank made progress for the exchange's time-out.
    """
    file = path / shard_file_name(exchange.topology.rank)
    try:
        _, damage = read_together(
            lambda on_progress: _verify(file, digest, on_progress), exchange, files, "--save", path
        )
    except ValueError as problem:
        raise NotReadBack(str(problem)) from None
    if damage:
        raise NotReadBack(damage)


def _verify(path: Location, digest: SidecarDigest, on_progress: OnProgress) -> None:
    """Raise DamagedFile, or FileNotFoundError, if the file or its sidecar is not what was written."""
    for file in (path, sidecar_path(path)):
        with closing(open_ranges(file)) as opened:
            opened.forget(0, 0)  # to the end: it would be read from the page cache otherwise
    checksums = read_sidecar(path, digest)
    with ThreadPoolExecutor(thread_count(), thread_name_prefix="read back") as pool:
        verify_file(path, checksums, pool.map, on_progress)


@contextmanager
def bounded(exchange: Exchange, flag: str, value: object) -> Iterator[None]:
    """For a block in which all ranks read files by a FileWorker, and exchange the results.

    If a rank makes no progress for the time-out of `exchange`, all ranks raise the same ValueError, which
    names the flag that the files belong to.
    """
    try:
        yield
        return
    except Stuck as stuck:
        where = f"rank {exchange.topology.rank} on {platform.node()}: {stuck}"
        reason = exchange.decide(where) or where
    except Abandoned as abandoned:
        reason = str(abandoned)
    except NoProgress as silence:
        reason = exchange.decide(str(silence)) or str(silence)
    fix = "start again when the storage answers, or raise --distributed-timeout-minutes if it is only slow"
    raise option_error(flag, value, f"{reason}; {fix}")
