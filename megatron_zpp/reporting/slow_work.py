"""Says what a run is doing while nothing else appears: building, loading, the first step."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_POLL = 0.5  # seconds
_FIRST_LINE = 10.0  # seconds after which there is a line; the next ones at twice the time


@contextmanager
def slow_work(
    latest: Callable[[], tuple[str, bool]],
    say: Callable[[str], None],
    *,
    poll: float = _POLL,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Watch the work of this rank from another thread while the block runs.

    `latest` returns what this rank does, such as "step 1, micro-batch 2 of 8", whose phase is the text before
    the first comma, and whether it may take any time: building, loading, saving, the first step. Only of that
    `say` gets a line after 10 s, 20 s, 40 s …, because a slow step has its own log line.
    """
    ended = threading.Event()

    def watch() -> None:
        phase, since, due = "", clock(), _FIRST_LINE
        while not ended.wait(poll):
            (text, patient), now = latest(), clock()
            if (current := text.partition(",")[0]) != phase:
                phase, since, due = current, now, _FIRST_LINE
            if patient and now - since >= due:
                say(f"{text}, {now - since:.0f} s so far")
                due *= 2

    thread = threading.Thread(target=watch, name="slow work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
