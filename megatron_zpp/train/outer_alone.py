"""The outer steps of a run without other islands."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.train.run import Run


class OuterAlone:
    """Takes an outer step after every --outer-interval steps, and after the last one of a run.

    It does for one run what Islands does for several, and all ranks make the same calls.
    """

    record: Mapping[str, Any] = {}  # nothing is sent

    def __init__(self, run: Run) -> None:
        assert run.outer is not None
        self._state, self._interval = run.outer, run.config.islands.outer_interval
        self._taken = run.start.iteration  # of the newest outer step, or behind those of earlier runs

    def start(self, progress: Progress) -> Progress:
        """Nobody has to be joined."""
        return progress

    begin = start

    def end(self, progress: Progress, *, last: bool) -> Progress:
        """Take an outer step, if one is due after this iteration."""
        if progress.iteration != self._taken and (last or progress.iteration % self._interval == 0):
            self._state.step_alone()
            self._taken = progress.iteration
        return progress

    def averaged(self, progress: Progress) -> AbstractContextManager[None]:
        """Have the outer weights in the block, for an evaluation."""
        return self._state.averaged() if progress.iteration % self._interval else nullcontext()

    def close(self, *, ended: bool) -> None:
        """There is no connection."""
