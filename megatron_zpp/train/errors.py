"""Ends a run that failed: one line that says what, on which host and rank; never a hang at exit."""

import hashlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from megatron_zpp.config.command_line import INTERRUPTED, one_line
from megatron_zpp.config.options import UsageError
from megatron_zpp.zero.topology import Topology


@contextmanager
def one_line_errors(
    prog: str, topology: Topology, *, debug: bool, speaks: Callable[[str], bool]
) -> Iterator[None]:
    """Turns an exception into one line on stderr and an exit status: 1, or 2 for a bad command line.

    `speaks` says of a message whether this rank is to say it, where several have the same. `debug` adds the
    traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        _leave(prog, topology, "interrupted", INTERRUPTED, speaks)
    except UsageError as error:
        _leave(prog, topology, f"error: {error}", 2, speaks)
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug or isinstance(error, ValueError | OSError) else " (--debug shows the traceback)"
        _leave(prog, topology, f"error: {one_line(error)}{hint}", 1, speaks)


def first_to_say(store: dist.Store, topology: Topology) -> Callable[[str], bool]:
    """For `one_line_errors`: of the ranks that have the same message, the first one says it."""

    def speaks(message: str) -> bool:
        key = hashlib.blake2b(message.encode(), digest_size=8).hexdigest()
        try:
            first = store.add(f"said/{key}", 1) == 1
        except dist.DistError:
            return True
        if topology.rank == 0:
            time.sleep(0.3)  # others may be about to ask the store, which goes with this process
        return first

    return speaks


def end_at_once(prog: str, topology: Topology, message: str, status: int) -> NoReturn:
    """One line, and the end of this process: from any thread, whatever the others hold or wait for."""
    where = f" [{platform.node()} rank {topology.rank}]" if topology.world_size > 1 else ""
    os.write(2, f"{prog}{where}: {message}\n".encode())  # sys.stderr may be locked by a thread that is stuck
    os._exit(status)


def _leave(prog: str, topology: Topology, message: str, status: int, speaks: Callable[[str], bool]) -> None:
    """Exits without waiting for collectives, threads or workers of a run that cannot go on."""
    sys.stderr.flush()
    sys.stdout.flush()
    if speaks(message):
        end_at_once(prog, topology, message, status)
    os._exit(status)
