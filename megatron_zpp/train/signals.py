"""What a scheduler or a person asks of a running process: the first signal to stop soon, the second now."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_zpp.config.command_line import INTERRUPTED
from megatron_zpp.train.errors import end_at_once
from megatron_zpp.zero.topology import Topology

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SAME_REQUEST = 1.0  # seconds: Ctrl-C reaches a rank from the terminal, and again from its launcher


class StopSignals:
    """Which of STOP_SIGNALS this process got first, if any."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._since = 0.0

    def take(self, number: int) -> bool:
        """Takes note of a signal; True if it is a second request."""
        if self.first is None:
            self.first, self._since = signal.Signals(number), time.monotonic()
            return False
        return time.monotonic() - self._since > _SAME_REQUEST


@contextmanager
def stop_signals(prog: str, topology: Topology) -> Iterator[StopSignals]:
    """Inside the block a signal is only noted, and a second one ends the process at once; main thread only.

    A thread reads the numbers that Python's C handler writes to a pipe, since the main thread sees no signal
    while a collective blocks it. Data loader workers ignore these signals, so the pipe is this process's.
    """
    signals = StopSignals()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in STOP_SIGNALS and signals.take(number):
                    name = signal.Signals(number).name
                    end_at_once(prog, topology, f"{name} again: ends at once, nothing is saved", INTERRUPTED)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    # A handler must be there for the number to be written; what it would do, the thread does.
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # pretrain_gpt.py blocks one as it starts
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)  # which ends the thread
        thread.join()
        os.close(reader)
