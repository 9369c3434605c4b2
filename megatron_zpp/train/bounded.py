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


def read_together(
    work: Callable[[OnProgress], Any], exchange: Exchange, files: FileWorker, flag: str, value: object
) -> tuple[Any, str | None]:
    """(what `work` returns on this rank, on all ranks the problem of the first rank that has one, or None).

    A problem is damage or an error of the file system. Other errors of `work` are raised. `flag` and `value`
    as in `bounded`.
    """
    result, problem = None, None
    with bounded(exchange, flag, value):
        try:
            result = files.run(work, exchange)
        except Stuck:
            raise
        except (DamagedFile, OSError) as damage:
            problem = one_line(damage)
        problem = exchange.first("problem", problem)
    return result, problem


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
