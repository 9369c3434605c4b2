"""Makes room for open files: the process that keeps the store of a run has several connections per rank."""

import os
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import suppress

from megatron_zpp.config.options import option_error

# Of each rank: for rendezvous, heartbeat, preflight, a load, save or data check, and the progress of that.
STORE_CONNECTIONS = 5
_BEFORE_THE_FIRST_STEP = 3  # of these, on every rank
_OTHER_FILES = 256  # libraries, devices, data and logs of the process


def raise_limit(process: int = 0) -> int:
    """Raises the soft limit of open files of a process to its hard limit, and returns what it is then.

    Process 0 is this one; another one must be this user's.
    """
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # not allowed here: the limit that there is has to do
            resource.prlimit(process, resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def make_room(keeper: int, ranks: int, say: Callable[[str], None]) -> None:
    """Lets the process `keeper` of this host keep the store of so many ranks; `say` hears if that may fail.

    Raises ValueError where the store cannot have the connections of all ranks.
    """
    try:
        limit = raise_limit(keeper)
    except OSError:  # a launcher of another user's, whose limit is not for us to know
        return
    need = STORE_CONNECTIONS * ranks + _OTHER_FILES
    if limit >= need:
        return
    who = "this process" if keeper == os.getpid() else f"process {keeper}"
    problem = (
        f"{who} on {platform.node()}, which keeps the store of {ranks} ranks, needs {need} open files; raise "
        "the hard limit (ulimit -Hn) where the run is started"
    )
    if limit < _BEFORE_THE_FIRST_STEP * ranks:
        raise option_error("ulimit -n", limit, problem)
    say(f"warning: ulimit -n {limit}: {problem}")
