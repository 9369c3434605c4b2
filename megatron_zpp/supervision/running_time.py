"""A clock that stands still while its process is stopped: by Ctrl-Z, `scontrol suspend`, a paused machine."""

import time


class RunningTime:
    """Seconds in which this process could run; one thread ticks, any may read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ticked = time.monotonic()

    def tick(self, longest: float) -> None:
        """Adds the time since the last tick, and of a longer one than `longest` that much: it was stopped."""
        now = time.monotonic()
        self.seconds += min(now - self._ticked, longest)
        self._ticked = now
