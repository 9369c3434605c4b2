"""What a rank is doing, as a sequence of marks; other ranks report the newest mark if the rank stops."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mark:
    """`number` grows with every mark, `since` is on the clock of its `Activity`.

    An activity may take --heartbeat-timeout; or `limit` seconds, so that slow ranks are reported soon; or, if
    it is `patient`, any time: building, loading, saving.
    """

    text: str
    number: int
    since: float
    patient: bool
    limit: float | None = None


class Activity:
    """The newest mark of this process.

    All ranks make the same marks in the same order, so the rank with the fewest marks is the one that
    stopped, and the others wait for it. `seconds` are those in which this process could run: they pause while
    it is stopped, by Ctrl-Z, `scontrol suspend` or a paused machine. One thread ticks; any thread may read.
    """

    def __init__(self) -> None:
        self.seconds, self._ticked = 0.0, time.monotonic()
        self.latest = Mark("starting", 0, self.seconds, patient=True)
        # Tells the other ranks that this one ends with an error; returns once they know.
        self.tell_error: Callable[[BaseException], None] = lambda error: None

    def now(self, text: str, *, patient: bool = False, limit: float | None = None) -> None:
        """Mark what begins here. Takes a microsecond; another thread may read the mark at any time."""
        self.latest = Mark(text, self.latest.number + 1, self.seconds, patient, limit)

    def tick(self, longest: float) -> None:
        """Add the time since the last tick, at most `longest` seconds: more means that it was stopped."""
        now = time.monotonic()
        self.seconds += min(now - self._ticked, longest)
        self._ticked = now

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write a line of the log in this block: it may take --heartbeat-timeout, also in a patient activity.

        A pipe may be full, and nobody read it. Other ranks write nothing, so this is no mark of its own. Does
        nothing in other threads than the main one, which makes the marks.
        """
        before = self.latest
        if not before.patient or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.latest = replace(before, text=f"{before.text}, report", since=self.seconds, patient=False)
        try:
            yield
        finally:
            self.latest = before
