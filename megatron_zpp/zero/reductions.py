"""Sums gradients over micro-batches and ranks, behind the backward that produces them."""

import torch
from torch import Tensor

from megatron_zpp.zero.collectives import Reduction
from megatron_zpp.zero.unit import Part, Residency, Unit


class Reductions:
    """Takes each unit's gradients when its backward is done.

    Sharded gradients (stages 2 and 3) are reduced after every micro-batch, since no rank keeps them whole;
    at stages 0 and 1 they accumulate whole and are reduced after the step's last one. Where there is
    nothing to sum they stay as they are.
    """

    def __init__(
        self, units: list[Unit], reduction: Reduction, residency: Residency, *, sums: bool = True
    ) -> None:
        """`sums` is False where gradients of a step's only micro-batch are the step's as they are."""
        self._units, self._reduction, self._residency, self._sums = units, reduction, residency, sums
        self._first = self._last = True

    def begin(self, *, first: bool, last: bool) -> None:
        """The backward that comes is of a step's first, last or another micro-batch."""
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

    def wait(self) -> None:
        """Lets the optimizer wait for every reduction."""
        for unit in self._units:
            unit.gradient_slot.wait()

    def release(self) -> None:
        """After the optimizer: the memory of the gradients is the next forward's, for activations."""
        for unit in self._units:
            unit.gradients = ()

    def _take(self, unit: Unit) -> None:
        """Moves `.grad` of every parameter to a flat buffer and starts the reduction that is due."""
        produced = [parameter.grad for parameter in unit.parameters]
        for parameter in unit.parameters:
            parameter.grad = None
        unit.gradient_slot.wait()
        only = self._first and self._last
        if only and not self._sums:
            unit.gradients = unit.parts_of(produced)
            return
        if len(unit.gradient_slot.buffer) and (only or self._residency.gradients_sharded):
            sent = unit.send_buffer(produced[0].dtype)
            torch._foreach_copy_(unit.views(sent), produced)
            if self._residency.optimizer_sharded:
                self._reduce_scatter(unit, sent, add=not self._first)
            else:
                self._all_reduce(unit, sent, torch.empty_like(sent, dtype=torch.float32))
            return
        if self._first:
            unit.accumulated = unit.new_sum()
            torch._foreach_copy_(unit.views(unit.accumulated), produced)
        else:
            torch._foreach_add_(unit.views(unit.accumulated), produced)
        if self._last:
            self._reduce_accumulated(unit)

    def _reduce_accumulated(self, unit: Unit) -> None:
        slot, total = unit.gradient_slot, unit.accumulated
        unit.accumulated = None  # its memory can be the shard's
        sent = total
        if len(slot.buffer):
            sent = slot.buffer.copy_(total)
            slot.gaps_of = sent.dtype
        if self._residency.optimizer_sharded:
            del total
            self._reduce_scatter(unit, sent, add=False)
        else:
            self._all_reduce(unit, sent, total)

    def _all_reduce(self, unit: Unit, sent: Tensor, total: Tensor) -> None:
        slot = unit.gradient_slot
        unit.gradients = (Part(0, total),)
        slot.gaps_of = None  # sums come back in it
        slot.pending = self._reduction.all_reduce(sent, slot.buffer if len(slot.buffer) else total, total)

    def _reduce_scatter(self, unit: Unit, sent: Tensor, *, add: bool) -> None:
        slot = unit.gradient_slot
        if not add:
            unit.gradients = (Part(0, torch.empty_like(unit.master, device=slot.buffer.device)),)
        (total,) = unit.gradients
        slot.pending = self._reduction.reduce_scatter(sent, total.flat, add=add, error=unit.error)
