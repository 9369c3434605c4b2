"""Runs file operations that may never return on a thread, so that the rank that waits can abandon them."""

import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import OnProgress


class Stuck(OSError):
    """The work made no progress during the time-out, or earlier work has not returned."""


class FileWorker:
    """Does one piece of work at a time, on a daemon thread, which does not keep the process alive."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether work is running, abandoned or not."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, work: Callable[[OnProgress], Any], exchange: Exchange) -> Any:
        """Return or raise what `work` does, which must call its argument whenever it makes progress.

        The progress is reported to the other ranks. Raises Stuck after the time-out of `exchange` without
        progress; the work is then abandoned, and ends when it next reports progress.
        """
        if self.busy:
            raise Stuck("is still busy with earlier files")
        piece = _Work(work, exchange.progress)
        self._thread = threading.Thread(target=piece.run, name="files", daemon=True)
        self._thread.start()
        limit = exchange.timeout.total_seconds()
        while self.busy:
            left = piece.moved + limit - time.monotonic()
            if left < 0:
                piece.abandoned = True
                raise Stuck(f"no progress for {exchange.timeout}")
            self._thread.join(left)
        return piece.outcome()


class _Work:
    """One piece of work. Its thread sets all fields except `abandoned`."""

    def __init__(self, work: Callable[[OnProgress], Any], on_progress: OnProgress) -> None:
        self._work, self._on_progress = work, on_progress
        self._result: Any = None
        self._error: BaseException | None = None
        self.abandoned = False
        self.moved = time.monotonic()  # when it began, or last made progress

    def run(self) -> None:
        """Do the work, on the thread."""
        try:
            self._result = self._work(self._step)
        except BaseException as error:
            self._error = error

    def outcome(self) -> Any:
        """Return or raise what the work did."""
        if self._error is not None:
            raise self._error
        return self._result

    def _step(self) -> None:
        if self.abandoned:
            raise Stuck("was given up")
        self.moved = time.monotonic()
        self._on_progress()
