"""Sums gradients over micro-batches and ranks, behind the backward that produces them."""

import torch
from torch import Tensor

from megatron_zpp.ops.checks import SQUARES_BLOCK
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.unit import Unit

# Elements of a 16-bit gradient that stays where the backward made it:
_STEPPED_THERE = 1 << 23  # a copy would move 32 MiB; without it the norm and AdamW need kernels of its own
_SENT_FROM_THERE = 1 << 20  # a copy would move 4 MiB; without it sending and summing need calls of its own


class Reductions:
    """Takes each unit's gradients when its backward is done.

    Sharded gradients (stages 2 and 3) are reduced after every micro-batch, since no rank keeps them whole;
    at stages 0 and 1 they accumulate whole and are reduced after the step's last one. Where there is
    nothing to sum they stay as they are.
    """

    def __init__(self, units: list[Unit], communication: Communication, *, accepts_16bit: bool) -> None:
        """`accepts_16bit`: whether the optimizer takes gradients in 16 bits."""
        self._units, self._reduction = units, communication.reduction
        self._plan, self._residency = communication.plan.reduction, communication.plan.residency
        self._sums = communication.plan.sums_gradients(1, accepts_16bit=accepts_16bit)
        self._dtype = self._plan.gradient_dtype
        self._first = self._last = True

    def begin(self, *, first: bool, last: bool) -> None:
        """The backward that comes is of a step's first, last or another micro-batch.

        What the one before sent is not needed any more: there was a forward to send it in.
        """
        self.wait(self._units)
        if first:
            self._remember_errors()
        self._first, self._last = first, last
        for unit in self._units:
            unit.arrived = 0

    def gradient_arrived(self, unit: Unit) -> None:
        """One more parameter of `unit` has its `.grad`."""
        unit.arrived += 1
        if unit.arrived == len(unit.parameters):
            self._take(unit)

    def finish_backward(self) -> None:
        """Takes the units of which a parameter had no part in the loss."""
        for unit in self._units:
            if unit.arrived < len(unit.parameters):
                for parameter in unit.parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                self._take(unit)

    def wait(self, units: list[Unit]) -> None:
        """Lets the compute wait for the reductions of these units."""
        for unit in units:
            unit.reducing.wait()

    def settle_errors(self, skipped: Tensor, rescale: Tensor | None) -> None:
        """After the optimizer's decision: error feedback keeps what it must send with the next step.

        The gradients of a step that was `skipped` (1, else 0) will never be used. So nothing that their sums
        lost is owed, and what was added to them is owed again: every error is what it was before the step.
        `rescale` is the next loss scale over this step's, in whose units errors are; None: it is fixed.
        """
        for unit in self._units:
            if unit.error is None:
                continue
            torch.where(skipped > 0, unit.error_before, unit.error, out=unit.error)
            if rescale is not None:
                unit.error.mul_(rescale)

    def release(self) -> None:
        """After the optimizer: the memory of the gradients is the next forward's, for activations."""
        for unit in self._units:
            unit.gradients, unit.squares = (), None

    def _remember_errors(self) -> None:
        """Copies all errors: whether a step is skipped is known at its end, when every micro-batch has
        changed them."""
        for unit in self._units:
            if unit.error is not None:
                unit.error_before.copy_(unit.error)

    def _take(self, unit: Unit) -> None:
        """Takes over `.grad` of every parameter and starts the reduction that is due."""
        produced = [parameter.grad for parameter in unit.parameters]
        for parameter in unit.parameters:
            parameter.grad = None
        unit.reducing.wait()
        only = self._first and self._last
        if only and not self._sums:
            unit.gradients = unit.grad_segments(produced, _STEPPED_THERE)
            return
        if only or self._plan.every_micro_batch:
            if produced[0].itemsize > self._dtype.itemsize:
                produced = [gradient.to(self._dtype) for gradient in produced]
            self._reduce(unit, unit.grad_segments(produced, _SENT_FROM_THERE), add=not self._first)
            return
        if self._first:
            unit.accumulated = unit.new_sum()
            torch._foreach_copy_(unit.views(unit.accumulated), produced)
        else:
            torch._foreach_add_(unit.views(unit.accumulated), produced)
        if self._last:
            self._reduce_accumulated(unit)

    def _reduce_accumulated(self, unit: Unit) -> None:
        sent = GradSegment(0, unit.accumulated.to(self._dtype))
        total = None if self._residency.optimizer_sharded else unit.accumulated
        unit.accumulated = None
        self._reduce(unit, (sent,), add=False, total=total)

    def _reduce(
        self, unit: Unit, sent: tuple[GradSegment, ...], *, add: bool, total: Tensor | None = None
    ) -> None:
        """Starts the sum over ranks: at stage 0 into `total`, if it is given, or else a new buffer."""
        unit.reducing.reads = sent
        device = sent[0].flat.device
        if not self._residency.optimizer_sharded:
            if total is None:
                total = torch.empty(unit.layout.numel, device=device)
            unit.gradients = (GradSegment(0, total),)
        elif not add:
            unit.gradients = (GradSegment(0, torch.empty_like(unit.master, device=device)),)
        ((_, summed),) = unit.gradients
        unit.squares = self._new_squares(summed)
        unit.reducing.pending = self._reduction.reduce(
            sent, summed, add=add, squares=unit.squares, error=unit.error
        )

    def _new_squares(self, summed: Tensor) -> Tensor | None:
        """Where the sums of a step's last micro-batch leave their squares, if they find them."""
        if not (self._last and self._plan.returns_squared_norms):
            return None
        return torch.empty(len(summed) // SQUARES_BLOCK, device=summed.device)
