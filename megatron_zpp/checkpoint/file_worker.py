"""Runs file operations that may never return on a thread, so that the rank that waits can abandon them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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
        moved, abandoned, outcome = time.monotonic(), False, Future[Any]()

        def on_progress() -> None:
            nonlocal moved
            if abandoned:
                raise Stuck("was given up")
            moved = time.monotonic()
            exchange.progress()

        def do() -> None:
            try:
                outcome.set_result(work(on_progress))
            except BaseException as error:
                outcome.set_exception(error)

        self._thread = threading.Thread(target=do, name="files", daemon=True)
        self._thread.start()
        limit = exchange.timeout.total_seconds()
        while self.busy:
            left = moved + limit - time.monotonic()
            if left < 0:
                abandoned = True
                raise Stuck(f"no progress for {exchange.timeout}")
            self._thread.join(left)
        return outcome.result()
