"""Raises the limit of open files: the process that hosts the store has several connections per rank."""

import os
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import suppress

from megatron_zpp.config.options import option_error

# Per rank: rendezvous, and up to two exchanges, each with another connection for its progress: a save or its
# read-back beside the training, and one that has just ended and is still being closed.
STORE_CONNECTIONS = 5
_BEFORE_THE_FIRST_STEP = 2  # of these, on every rank
OTHER_FILES = 256  # libraries, devices, data and logs of the process


def raise_limit(process: int = 0) -> int:
    """Raise the soft limit of open files of a process to its hard limit, and return the new soft limit.

    Process 0 is this process; any other must belong to the same user.
    """
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # not permitted: the present limit remains
            resource.prlimit(process, resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def reserve_connections(keeper: int, ranks: int, say: Callable[[str], None], others: int = 0) -> None:
    """Prepare process `keeper` of this host to host the store of this many ranks; warn if its limit is low.

    `others` are connections of the process that have nothing to do with the store.
    Raises ValueError if the store cannot hold the connections that all ranks need before the first step.
    """
    try:
        limit = raise_limit(keeper)
    except OSError:  # the launcher of another user, whose limit cannot be read
        return
    need = STORE_CONNECTIONS * ranks + others + OTHER_FILES
    if limit >= need:
        return
    who = "this process" if keeper == os.getpid() else f"process {keeper}"
    problem = (
        f"{who} on {platform.node()}, which hosts the store of {ranks} ranks, needs {need} open files; raise "
        "the hard limit (ulimit -Hn) before starting the run"
    )
    if limit < _BEFORE_THE_FIRST_STEP * ranks + others:
        raise option_error("ulimit -n", limit, problem)
    say(f"warning: ulimit -n {limit}: {problem}")
