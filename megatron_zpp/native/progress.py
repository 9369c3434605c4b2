"""Shows that slow work is going on, by a line from time to time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 10.0


@contextmanager
def shown(
    say: Callable[[str], None], doing: Callable[[], str], done: str, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """While the block runs, call `say` with `doing()` and the time so far, every `every` seconds.

    A block that took longer than that also gets a last line, `done` and its time.
    """
    started, ended = time.monotonic(), threading.Event()

    def work() -> None:
        while not ended.wait(every):
            say(f"{doing()}, {time.monotonic() - started:.0f} s so far")

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if time.monotonic() - started > every:
        say(f"{done} in {time.monotonic() - started:.0f} s")
