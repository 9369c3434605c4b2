"""A clock that pauses while its process is stopped: by Ctrl-Z, `scontrol suspend` or a paused machine."""

import time


class RunningTime:
    """Seconds in which this process could run. One thread ticks; any thread may read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ticked = time.monotonic()

    def tick(self, longest: float) -> None:
        """Add the time since the last tick, at most `longest` seconds: more means that it was stopped."""
        now = time.monotonic()
        self.seconds += min(now - self._ticked, longest)
        self._ticked = now
