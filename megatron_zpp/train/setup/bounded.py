"""Ends a run in one line on all ranks if a rank makes no progress with files that the run needs to start."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_zpp.checkpoint.file_worker import FileWorker, Stuck
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.exchange import Abandoned, Exchange, NoProgress
from megatron_zpp.storage.checksums import DamagedFile, OnProgress
from megatron_zpp.storage.location import ObjectError
from megatron_zpp.storage.regular import says_what_is_there


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
            is_damage = _is_damaged(error)
            reason = one_line(error) if is_damage else _unreadable(error, exchange.topology.rank)
            problem = {"reason": reason, "is_damage": is_damage}
        problem = exchange.first("problem", problem)
    if problem is None:
        return result, None
    if not problem["is_damage"]:
        raise option_error(flag, value, problem["reason"])
    return result, problem["reason"]


def _is_damaged(error: Exception) -> bool:
    """Return whether an error says that a checkpoint is damaged, so that an older one may take its place.

    Storage that does not answer says nothing about a checkpoint.
    """
    if isinstance(error, OSError):
        return says_what_is_there(error) and not isinstance(error, ObjectError)
    return isinstance(error, DamagedFile)


def _unreadable(error: Exception, rank: int) -> str:
    if isinstance(error, ObjectError):
        return one_line(error)  # with a remedy
    fix = "start again once it can be read"
    if isinstance(error, PermissionError):
        fix = "let the user of the run read it"
    return f"rank {rank} on {platform.node()}: {one_line(error)}; {fix}"


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
        reason = exchange.abandon(where) or where
    except Abandoned as abandoned:
        reason = str(abandoned)
    except NoProgress as silence:
        reason = exchange.abandon(str(silence)) or str(silence)
    fix = "start again when the storage answers, or raise --distributed-timeout-minutes if it is only slow"
    raise option_error(flag, value, f"{reason}; {fix}")
