"""A thread for file work that may never return, so that the rank that waits for it can give it up."""

import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import OnProgress

_LOOKS = 8  # at the progress of the work, within the time-out


class Stuck(OSError):
    """The work made no progress for the time-out, or earlier work still has not returned."""


class FileWorker:
    """Does one piece of work at a time, on a thread that does not keep the process from ending."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way, or was left behind and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, work: Callable[[OnProgress], Any], exchange: Exchange) -> Any:
        """Returns or raises what `work` does, which has to call its argument whenever it makes progress.

        The other ranks hear of the progress. Raises Stuck after the time-out of `exchange` without any; the
        work is then left behind, and ends when it next reports progress.
        """
        if self.busy:
            raise Stuck("is still busy with the files of an earlier save")
        piece = _Piece(work, exchange.progress)
        self._thread = threading.Thread(target=piece.run, name="files", daemon=True)
        self._thread.start()
        limit = exchange.timeout.total_seconds()
        steps, since = piece.steps, time.monotonic()
        while self.busy:
            self._thread.join(limit / _LOOKS)
            if steps != piece.steps:
                steps, since = piece.steps, time.monotonic()
            elif self.busy and time.monotonic() - since > limit:
                piece.abandoned = True
                raise Stuck(f"no progress for {exchange.timeout}")
        return piece.outcome()


class _Piece:
    """One piece of work: written by its thread, but for `abandoned`."""

    def __init__(self, work: Callable[[OnProgress], Any], on_progress: OnProgress) -> None:
        self._work, self._on_progress = work, on_progress
        self._result: Any = None
        self._error: BaseException | None = None
        self.steps, self.abandoned = 0, False

    def run(self) -> None:
        """The thread."""
        try:
            self._result = self._work(self._step)
        except BaseException as error:
            self._error = error

    def outcome(self) -> Any:
        """Returns or raises what the work did."""
        if self._error is not None:
            raise self._error
        return self._result

    def _step(self) -> None:
        if self.abandoned:
            raise Stuck("was given up")
        self.steps += 1
        self._on_progress()
