"""Says what a run is doing while nothing else appears: building, loading, the first step."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_POLL = 0.5  # seconds
_FIRST_LINE = 10.0  # seconds after which there is a line; the next ones at twice the time


class Work(Protocol):
    """What a rank does at the moment. The phase is the text before the first comma."""

    @property
    def text(self) -> str:
        """Such as "step 1, micro-batch 2 of 8"."""

    @property
    def patient(self) -> bool:
        """Whether it may take any time: building, loading, saving, the first step."""


@contextmanager
def slow_work(
    latest: Callable[[], Work],
    say: Callable[[str], None],
    *,
    poll: float = _POLL,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Watch the work of this rank from another thread while the block runs.

    `say` gets a line after 10 s, 20 s, 40 s …, but only for patient work: a slow step has its own log line.
    """
    ended = threading.Event()

    def watch() -> None:
        phase, since, due = "", clock(), _FIRST_LINE
        while not ended.wait(poll):
            work, now = latest(), clock()
            if (current := work.text.partition(",")[0]) != phase:
                phase, since, due = current, now, _FIRST_LINE
            if work.patient and now - since >= due:
                say(f"{work.text}, {now - since:.0f} s so far")
                due *= 2

    thread = threading.Thread(target=watch, name="slow work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
