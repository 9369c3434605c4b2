"""Shows what a run is doing while nothing else appears: building, loading, the first step, an evaluation."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tqdm import tqdm

_POLL = 0.5  # seconds
_SHOW, _SHOW_STEPS = 2.0, 10.0  # seconds after which a terminal shows a phase
_FIRST_LINE = 10.0  # seconds after which a log gets a line; the next ones at twice the time


class Work(Protocol):
    """What a rank does at the moment. The phase is the text before the first comma."""

    @property
    def text(self) -> str:
        """Such as "step 1, micro-batch 2 of 8"."""

    @property
    def patient(self) -> bool:
        """Whether it may take any time: building, loading, saving, the first step."""


class SlowWork:
    """Watches the work of this rank from another thread. Use it in a `with` block.

    On a terminal a phase that lasts is shown with its time in a line that disappears with it. Elsewhere `say`
    gets a line after 10 s, 20 s, 40 s …, but only for patient work: a slow step has its own log line.
    """

    def __init__(
        self,
        latest: Callable[[], Work],
        say: Callable[[str], None],
        *,
        poll: float = _POLL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latest, self._say, self._poll, self._clock = latest, say, poll, clock
        self._terminal = sys.stderr.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="slow work", daemon=True)
        self._status: tqdm | None = None

    def __enter__(self) -> "SlowWork":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._hide()

    def _work(self) -> None:
        phase, since, due = "", self._clock(), _FIRST_LINE
        while not self._ended.wait(self._poll):
            work = self._latest()
            now = self._clock()
            if (current := work.text.partition(",")[0]) != phase:
                phase, since, due = current, now, _FIRST_LINE
                self._hide()
            lasts = now - since
            if self._terminal:
                if lasts >= (_SHOW if work.patient else _SHOW_STEPS):
                    self._show(f"{work.text}: {lasts:.0f} s")
            elif work.patient and lasts >= due:
                self._say(f"{work.text}, {lasts:.0f} s so far")
                due *= 2

    def _show(self, text: str) -> None:
        if self._status is None:
            self._status = tqdm(
                total=0, bar_format="{desc}", leave=False, file=sys.stderr, dynamic_ncols=True
            )
        self._status.set_description_str(text)

    def _hide(self) -> None:
        if self._status is not None:
            self._status.close()
            self._status = None
