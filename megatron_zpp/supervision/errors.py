"""Ends a failed run with one line that names the error, the host and the rank, and without a hang at exit."""

import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megatron_zpp.config.command_line import DEBUG, INTERRUPTED, one_line
from megatron_zpp.config.options import UsageError
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.once_per_node import Say, say_here, write_line


@contextmanager
def one_line_errors(prog: str, topology: Topology, *, say: Say = say_here) -> Iterator[None]:
    """Turn an exception into one line on stderr and an exit status: 1, or 2 for a bad command line.

    `say` writes the line unless another rank has written one with the same message; by default always. This
    process exits only after that, whatever signals its launcher sends. MEGATRON_ZPP_DEBUG in the environment
    adds the traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        _leave(prog, topology, "interrupted", INTERRUPTED, say)
    except UsageError as error:
        _leave(prog, topology, f"error: {error}", 2, say)
    except Exception as error:
        shown = bool(os.environ.get(DEBUG))
        if shown:
            traceback.print_exc()
        hint = "" if shown or isinstance(error, ValueError | OSError) else f" ({DEBUG}=1 shows the traceback)"
        _leave(prog, topology, f"error: {one_line(error)}{hint}", 1, say)


def end_at_once(prog: str, topology: Topology, problem: str) -> NoReturn:
    """End this process with an error line, from any thread, whatever other threads hold or wait for."""
    write_line(line_of(prog, topology, f"error: {problem}"))
    os._exit(1)


def line_of(prog: str, topology: Topology, message: str) -> str:
    """The line for a message, with host and rank if there are several ranks."""
    where = f" [{platform.node()} rank {topology.rank}]" if topology.world_size > 1 else ""
    return f"{prog}{where}: {message}"


def _leave(prog: str, topology: Topology, message: str, status: int, say: Say) -> NoReturn:
    """Exit without waiting for collectives, threads or workers of a run that cannot continue."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a launcher ends all ranks when the first one exits
    sys.stderr.flush()
    sys.stdout.flush()
    say(message, line_of(prog, topology, message))
    os._exit(status)
