"""Ends a run that failed: one line that says what, on which host and rank; never a hang at exit."""

import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megatron_zpp.config.command_line import INTERRUPTED, one_line
from megatron_zpp.config.options import UsageError
from megatron_zpp.zero.topology import Topology


@contextmanager
def one_line_errors(prog: str, topology: Topology, *, debug: bool, every_rank: bool) -> Iterator[None]:
    """Turns an exception into one line on stderr and an exit status: 1, or 2 for a bad command line.

    Before the process group exists all ranks of a node fail alike, so the first of them speaks for all;
    with `every_rank` each speaks for itself. `debug` adds the traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        _leave(prog, topology, "interrupted", INTERRUPTED, every_rank)
    except UsageError as error:
        _leave(prog, topology, f"error: {error}", 2, every_rank)
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug or isinstance(error, ValueError | OSError) else " (--debug shows the traceback)"
        _leave(prog, topology, f"error: {one_line(error)}{hint}", 1, every_rank)


def end_at_once(prog: str, topology: Topology, message: str, status: int) -> NoReturn:
    """One line, and the end of this process: from any thread, whatever the others hold or wait for."""
    where = f" [{platform.node()} rank {topology.rank}]" if topology.world_size > 1 else ""
    os.write(2, f"{prog}{where}: {message}\n".encode())  # sys.stderr may be locked by a thread that is stuck
    os._exit(status)


def _leave(prog: str, topology: Topology, message: str, status: int, every_rank: bool) -> None:
    """Exits without waiting for collectives, threads or workers of a run that cannot go on."""
    sys.stderr.flush()
    sys.stdout.flush()
    if every_rank:
        end_at_once(prog, topology, message, status)
    if topology.local_rank == 0:
        end_at_once(prog, Topology(), message, status)
    os._exit(status)
