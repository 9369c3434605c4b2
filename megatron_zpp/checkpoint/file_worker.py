"""Runs file operations that may never return on a thread, so that the rank that waits can abandon them."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.background import started
from megatron_zpp.storage.checksums import OnProgress


class Stuck(OSError):
    """The work made no progress during the time-out, or earlier work has not returned."""


class FileWorker:
    """Does one piece of work at a time, on a thread that does not keep the process alive."""

    def __init__(self) -> None:
        self._outcome: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether work is running, abandoned or not."""
        return self._outcome is not None and not self._outcome.done()

    def run(self, work: Callable[[OnProgress], Any], exchange: Exchange) -> Any:
        """Return or raise what `work` does, which must call its argument whenever it makes progress.

        The progress is reported to the other ranks. Raises Stuck after the time-out of `exchange` without
        progress; the work is then abandoned, and ends when it next reports progress.
        """
        if self.busy:
            raise Stuck("is still busy with earlier files")
        moved, abandoned = time.monotonic(), False

        def on_progress() -> None:
            nonlocal moved
            if abandoned:
                raise Stuck("was given up")
            moved = time.monotonic()
            exchange.progress()

        self._outcome = outcome = started(lambda: work(on_progress), "files")
        limit = exchange.timeout.total_seconds()
        while not outcome.done():
            left = moved + limit - time.monotonic()
            if left < 0:
                abandoned = True
                raise Stuck(f"no progress for {exchange.timeout}")
            wait([outcome], left)
        self._outcome = None  # which would keep what the work returned
        return outcome.result()
