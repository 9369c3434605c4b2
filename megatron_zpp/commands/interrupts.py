"""Ctrl-C while a program imports its modules, when Python would print a traceback of each rank."""

import os
import signal
import sys
from types import FrameType


def end_on_interrupt() -> None:
    """Let SIGINT end this process, with a line of one rank per node, until the program handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell's job in the background
        signal.signal(signal.SIGINT, _end)


def is_first_of_node() -> bool:
    """Whether this process is the one of its node that says what all would say."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _end(number: int, frame: FrameType | None) -> None:
    if is_first_of_node():
        os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode())
    os._exit(130)  # the shell's status for a program stopped by Ctrl-C
