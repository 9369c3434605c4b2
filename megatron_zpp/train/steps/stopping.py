"""Why a run ends before its schedule does: all ranks find out at the same step. And how it then exits."""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.distributed.vote import Vote
from megatron_zpp.storage.lease import Lease
from megatron_zpp.supervision.once_per_node import process_started
from megatron_zpp.supervision.signals import STOP_SIGNALS, StopSignals
from megatron_zpp.zero.engine import StepResult, ZeroEngine

STOPPED = 75  # sysexits.h's EX_TEMPFAIL: start the same command again to resume
FAILED, NOT_FINITE = 1, 3
_MOST_NOT_FINITE = 10  # steps in a row with NaN or Inf


class Stop(Exception):
    """Ends the run with exit status `status`; all ranks raise it at the same step or evaluation round.

    The run saves first, unless `saves` is False.
    """

    def __init__(self, status: int, reason: str, *, saves: bool = True) -> None:
        super().__init__(reason)
        self.status, self.is_error, self.saves = status, status in (FAILED, NOT_FINITE), saves


@dataclass(frozen=True)
class Ending:
    """How a run ended: at which iteration, the reason if it ended early, and whether a sink was lost."""

    iteration: int
    stop: Stop | None
    lost_sinks: bool

    def leave(self, prog: str, rank: int) -> None:
        """Exit with the status of the reason to stop; return if the run reached the end of its schedule."""
        if self.stop and self.stop.is_error and rank == 0:
            sys.stderr.write(f"{prog}: error: iteration {self.iteration}: {self.stop}\n")
        status = self.stop.status if self.stop else 0
        if self.lost_sinks:  # their exit handlers would fail again, or hang
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if status:
            sys.exit(status)


class StopConditions:
    """Votes after every step and every round of an evaluation.

    A reason to stop takes effect on all ranks at the same vote, at most one vote after a rank noticed it.
    """

    def __init__(
        self,
        training: TrainingConfig,
        engine: ZeroEngine,
        signals: StopSignals,
        lease: Lease | None = None,
    ) -> None:
        """`lease` is that of --save, on rank 0."""
        self._engine = engine
        self._training, self._signals, self._lease = training, signals, lease
        self._vote = Vote(len(STOP_SIGNALS) + 2, engine.topology, engine.device)
        self._started = _now()
        with suppress(OSError):
            self._started = process_started()  # long before this, where much was loaded and built
        self._voted_step: int | None = None  # the step of the newest vote; None: it was in an evaluation
        self._in_a_row = 0  # number of newest steps with NaN or Inf in gradients or loss

    def after_step(self, iteration: int, result: StepResult, *, last: bool) -> None:
        """Raise Stop if the run has to end here; `iteration` counts this step.

        --exit-interval does not stop it behind the last step: the final evaluations would be missing.
        """
        not_finite = result.skipped * self._engine.loss_scale.is_lowest(result.loss_scale)
        self._stop_if_asked(self._vote.turn(self._flags(), not_finite))
        self._voted_step = iteration
        interval = self._training.exit_interval
        if interval and iteration % interval == 0 and not last:
            raise Stop(0, f"--exit-interval {interval}")

    def before_save(self) -> None:
        """Raise Stop if nodes hold other references of weight differences than node 0."""
        if self._engine.weights.formats is None:
            return
        differing = self._engine.weights.differing_references()
        if differing is not None:
            raise Stop(
                FAILED,
                f"the reference of weight differences is not that of node 0 in {differing}: memory or the "
                "network changed it; nothing is saved; resume from the newest checkpoint, without that node "
                "if it happens again",
                saves=False,
            )

    def between_rounds(self) -> None:
        """Raise Stop if an evaluation has to be abandoned."""
        self._stop_if_asked(self._vote.turn(self._flags()))
        self._voted_step = None

    def at_the_end(self) -> None:
        """Raise Stop, after the last step, if the newest steps had NaN or Inf."""
        self._stop_if_asked(self._vote.outcome())

    def _flags(self) -> list[bool]:
        minutes = (_now() - self._started) / 60
        limit = self._training.exit_duration_in_mins
        late = limit is not None and minutes >= limit
        lost = self._lease is not None and self._lease.lost
        return [*(self._signals.first == number for number in STOP_SIGNALS), late, lost]

    def _stop_if_asked(self, sums: list[float] | None) -> None:
        """Raise Stop if `sums` over all ranks, the newest known, ask for it."""
        if sums is None:
            return
        *signalled, late, lost, not_finite = sums
        if lost:
            why = (
                "another run has taken over --save, or RUNNING.json was removed there; nothing more is saved"
            )
            raise Stop(FAILED, why, saves=False)
        if self._voted_step is not None:
            self._in_a_row = self._in_a_row + 1 if not_finite else 0
        if self._in_a_row >= _MOST_NOT_FINITE:
            raise Stop(
                NOT_FINITE,
                f"the {_MOST_NOT_FINITE} steps up to iteration {self._voted_step} had NaN or Inf in loss or "
                "gradients, and were skipped: the weights are those before these steps; resume from an "
                "earlier checkpoint (--ckpt-step) with a lower --lr or other data",
            )
        for number, ranks in zip(STOP_SIGNALS, signalled, strict=True):
            if ranks:
                raise Stop(STOPPED, number.name)
        if late:
            raise Stop(0, f"--exit-duration-in-mins {self._training.exit_duration_in_mins}")


def _now() -> float:
    """The clock of `process_started`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
