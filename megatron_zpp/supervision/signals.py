"""Signals from a scheduler or a person: the first asks a run to stop soon, the second to stop now."""

import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_zpp.config.command_line import INTERRUPTED
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.once_per_node import Say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SAME_REQUEST = 1.0  # seconds: Ctrl-C reaches a rank from the terminal, and again from its launcher


class StopSignals:
    """The first of STOP_SIGNALS that this process received, if any."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.over = False

    def finish(self) -> None:
        """The work of all ranks is done: a launcher's signals to those that have not exited mean nothing."""
        self.over = True

    def told_to_stop(self) -> bool:
        """Whether a launcher or a person waits for the end; a launcher kills ranks that take long."""
        return self.first in (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(prog: str, topology: Topology, per_node: Say, *, saves: bool) -> Iterator[StopSignals]:
    """Record the first signal while the block runs; a second one ends the process. Main thread only.

    After `finish` this process ignores them, but for SIGINT, until its end: torchrun sends SIGTERM as soon as
    a rank has exited with the status that asks for a restart.
    Each signal is reported at once, once per node; `saves` is whether the run has a place to save to. A
    thread reads the numbers that Python's C handler writes to a pipe, because the main thread sees no signal
    while a collective blocks it. Data loader workers ignore these signals, so the pipe is not shared.
    """
    signals = StopSignals()
    node = f"{prog} [{platform.node()}]" if topology.world_size > 1 else prog
    # On a terminal the ^C stands in the line of the cursor.
    begin, since = f"\n{node}" if os.isatty(2) else node, 0.0

    def take(number: int) -> None:
        nonlocal since
        if signals.over and number != signal.SIGINT:
            return
        if signals.first is None:
            signals.first, since = signal.Signals(number), time.monotonic()
            per_node("stop", f"{begin}: {_promise(number, saves=saves)}")
        elif time.monotonic() - since > _SAME_REQUEST:
            name = signal.Signals(number).name
            per_node("end", f"{begin}: {name} again: ends at once, nothing is saved")
            os._exit(INTERRUPTED)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    take(number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Python writes the number only if there is a handler; the thread does the handler's work.
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # pretrain_gpt.py blocks one as it starts
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            ignored = signals.over and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else handler)
        os.close(writer)  # which ends the thread
        thread.join()
        os.close(reader)


def _promise(number: int, *, saves: bool) -> str:
    """The line on what the first signal starts."""
    name = "" if number == signal.SIGINT else f"got {signal.Signals(number).name}: "
    saving = " and saving" if saves else "; nothing is saved without --save"
    again = "; press again to end now" if number == signal.SIGINT else ""
    return f"{name}stopping after this step{saving}{again}"
