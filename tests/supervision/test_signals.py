"""Signals to a rank whose work is done, in a process of its own."""

import signal

import pytest

from tests.support import run

ENDING = """
import os, signal, sys, time
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision import signals as module
from megatron_zpp.supervision.once_per_node import say_here
module._SAME_REQUEST = 0.0
with module.stop_signals("test", Topology(), say_here, saves=True) as signals:
    os.kill(os.getpid(), signal.SIGUSR1)
    while signals.first is None:
        time.sleep(0.01)
    signals.finish()
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.5)
os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(0.5)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_launcher_cannot_change_the_status_of_a_rank_that_is_done(number: int, status: int) -> None:
    """torchrun sends SIGTERM once another rank has exited; a person may still press Ctrl-C."""
    done = run("-c", ENDING, str(int(number)))
    assert done.returncode == status, done.stderr
    promise = "test: got SIGUSR1: stopping after this step and saving\n"
    assert done.stderr == promise + (
        "" if status == 75 else "test: SIGINT again: ends at once, nothing is saved\n"
    )
