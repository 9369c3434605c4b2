"""Sums gradients over micro-batches and ranks, behind the backward that produces them."""

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from megatron_zpp.distributed.comm_stream import Pending, all_of
from megatron_zpp.exchange.codecs import Codec, Feedback, Rotation, clear
from megatron_zpp.exchange.reductions import Target
from megatron_zpp.exchange.route import nbytes
from megatron_zpp.exchange.segments import GradSegment, segments_inside, segments_of
from megatron_zpp.ops.formats import SQUARES_BLOCK, LloydMaxFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.reads import order_after
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.tensor_parallel import TensorShare, start_replicated_sum

# A 16-bit gradient of so many elements stays where the backward made it:
STEPPED_THERE = 1 << 23  # a copy would move 32 MiB; without it the norm and AdamW launch more kernels
_SENT_FROM_THERE = 1 << 20  # a copy would move 4 MiB; without it sending and summing take more calls
# Of random signs, equal on all ranks and after a resume with another --seed; they may repeat between runs.
SIGNS_SEED = 0
_SUM_SIGNS_SEED = 1  # of sums, which are of numbers that were rotated by the signs of the first
_ARRIVED_TWICE = (
    "its gradient arrives once more in a backward, when it has been sent; a module that runs several times "
    "in torch.utils.checkpoint needs use_reentrant=False"
)
_SPARSE = "its gradient is sparse, and gradients are summed as dense ones; look rows up with sparse=False"
_BESIDE = (
    "its gradient arrives outside of accumulate, so that no step would have it; call accumulate in place of "
    "backward, and add losses of one batch up in the forward"
)


class Gradients:
    """Takes each unit's gradients when its backward is done.

    The route of the gradients says what is sent when. If no stage runs after every micro-batch, gradients
    accumulate whole and are reduced behind the last backward. If all do, so are gradients. If some do, each
    micro-batch adds to what a group keeps, and the other stages run once per step, unit by unit, behind the
    last backward. Where there is nothing to sum gradients stay as they are.

    `consume` gets each unit when a backward has made all of its gradient; by default it does nothing.
    """

    def __init__(
        self,
        units: list[Unit],
        communication: Communication,
        operations: Operations,
        *,
        accepts_16bit: bool,
        share: TensorShare,
    ) -> None:
        """`units`: the trained ones. `accepts_16bit`: whether the optimizer takes gradients in 16 bits."""
        plan, self._units, self._operations = communication.plan, units, operations
        self._reductions = {unit: communication.reductions[unit.plan.gradients] for unit in units}
        self._slots, self._legs = plan.reduction_slots, communication.legs
        self._sums = plan.sums_gradients(1, accepts_16bit=accepts_16bit)
        self._reducing: dict[int, Unit] = {}  # the last unit that was reduced in each slot
        self.consume: Callable[[Unit], None] = lambda unit: None
        self._first = self._last = True
        self.order = 0  # follows from this step's micro-batches, and the order in which units were sent in it
        self.unfinished = False  # a backward has begun and has not ended: it runs, or has raised
        self._iteration = 0
        self._feeds_back = any(unit.residuals for unit in units)
        self._owned_gaps = {unit: unit.layout.gaps_in(unit.owned) for unit in units}
        self._gaps = {unit: unit.layout.gaps_in(unit.plan.shard) for unit in units}
        self._whole_gaps = {unit: unit.layout.gaps_in(range(unit.layout.numel)) for unit in units}
        self._share = share
        self._replicated = {unit: share.replicated(unit.layout) for unit in units}
        self.counted_elsewhere = {  # blocks of squares of a shard that another tensor rank counts
            unit: share.counted_elsewhere(unit.layout, unit.plan.shard) for unit in units
        }

    def begin(self, *, first: bool, last: bool, iteration: int, scale: Tensor, count: int) -> None:
        """Prepare for the backward of step `iteration`'s first, last or another micro-batch.

        The step sums `count` gradients of losses times `scale` (). Waits for the reductions of the previous
        micro-batch, which the forward hid. The first micro-batch drops what an abandoned step left.
        """
        self.wait()
        if first:
            self.release()
            self.order = order_after(0, count)
        self.unfinished = True
        self._first, self._last, self._iteration = first, last, iteration
        if first and self._feeds_back:
            self._divisor = scale * count
        for unit in self._units:
            unit.grad.arrived = {}  # where the last backward has raised, there were some

    def gradient_arrived(self, unit: Unit, index: int, parameter: nn.Parameter) -> None:
        """Take the `.grad` of a parameter of `unit`, which has arrived; the last one starts the reduction.

        Where a unit has several places, autograd has added theirs. Raises RuntimeError for a gradient that
        the step would not have: of a backward beside `accumulate`, or behind those that started a reduction.
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        arrived = unit.grad.arrived
        if not self.unfinished or gradient.is_sparse or arrived is None:
            why = _SPARSE if gradient.is_sparse else _ARRIVED_TWICE if self.unfinished else _BESIDE
            raise RuntimeError(f"{unit.names[index]}: {why}")
        arrived[index] = arrived[index] + gradient if index in arrived else gradient
        del gradient  # what is copied is freed before the reduction
        if len(arrived) == len(unit.parameters):
            self._take(unit, arrived)

    def finish_backward(self) -> None:
        """Take the gradients of units with a parameter that had no part in the loss."""
        for unit in self._units:
            if (arrived := unit.grad.arrived) is not None:
                for index, parameter in enumerate(unit.parameters):
                    if index not in arrived:
                        arrived[index] = torch.zeros_like(parameter)
                self._take(unit, arrived)
        self.unfinished = False

    def wait(self, units: list[Unit] | None = None) -> None:
        """Let the compute wait for the reductions of these units, by default of all: REDUCING -> SUMMED."""
        for unit in self._units if units is None else units:
            unit.grad.wait()

    def squares_of(self, unit: Unit) -> Tensor:
        """The sums of the squares of each block of this rank's shard of a gradient, which is SUMMED.

        Those of blocks that another tensor rank counts are 0.
        """
        sums = unit.grad.squares
        if sums is None:
            shard = range(unit.owned.stop - unit.owned.start)[unit.shard]
            segments = list(segments_inside(unit.grad.segments, shard))
            counts = [len(segment.flat) // SQUARES_BLOCK for segment in segments]
            sums = torch.empty(sum(counts), device=unit.full.device)
            for segment, its_sums in zip(segments, sums.split(counts), strict=True):
                self._operations.sum_squares(segment.flat, its_sums)
        for blocks in self.counted_elsewhere[unit]:
            sums[blocks.start : blocks.stop].zero_()
        return sums

    def end_step(self, found_inf: Tensor) -> None:
        """Release all gradients.

        A step that was skipped, because `found_inf` () is 1, has dropped what its messages had of residuals,
        which begin at zero again.
        """
        self.release()
        for residual in chain.from_iterable(unit.residuals or () for unit in self._units):
            residual.masked_fill_(found_inf != 0, 0.0)

    def release(self) -> None:
        """Give the memory of all gradients to the next forward, for activations: any state -> EMPTY."""
        for unit in self._units:
            unit.grad.release()

    def _take(self, unit: Unit, arrived: dict[int, Tensor]) -> None:
        unit.grad.arrived = None
        self._start_reduction(unit, arrived)
        self.consume(unit)

    def _start_reduction(self, unit: Unit, arrived: dict[int, Tensor]) -> None:
        """Take over the gradient of every parameter, and start the reduction that is due.

        EMPTY -> SUMMED where there is nothing to sum, or REDUCING where tensor ranks alone sum parameters
        that all of them have, beside the backward of other units; else -> ACCUMULATING or REDUCING.
        """
        first, last = self._first, self._last
        produced = [arrived.pop(index) for index in range(len(arrived))]
        replicated = self._replicated[unit]
        group, finish_sum = self._share.group, None
        if group is not None and replicated:
            finish_sum = start_replicated_sum(group, [produced[index] for index in replicated])
        only = first and last
        if only and not self._sums:
            unit.grad.segments = segments_of(unit.layout, produced, STEPPED_THERE)
            if finish_sum is not None:
                places = [unit.view_in(unit.grad.segments, index) for index in replicated]
                unit.grad.pending = Pending(partial(finish_sum, places))
            return
        if finish_sum is not None:
            finish_sum([produced[index] for index in replicated])
        if last or unit.plan.every_micro_batch:  # it is sent
            self.order = order_after(self.order, unit.number)
        if reducing := self._reducing.get(self._slots[unit.number]):
            reducing.grad.wait()  # so that no more than two units of a layout keep what they send
        if only or unit.plan.every_micro_batch:
            dtype = unit.plan.gradient_dtype
            if produced[0].itemsize > dtype.itemsize:
                produced = [gradient.to(dtype) for gradient in produced]
            self._reduce(unit, segments_of(unit.layout, produced, _SENT_FROM_THERE))
            return
        if first:
            whole = torch.empty(unit.layout.numel, device=unit.full.device)
            clear(whole, self._whole_gaps[unit])
            unit.grad.accumulated, unit.grad.views = whole, unit.views(whole)
            torch._foreach_copy_(unit.grad.views, produced)
        else:
            torch._foreach_add_(unit.grad.views, produced)
        if last:
            assert unit.grad.accumulated is not None
            whole = unit.grad.accumulated
            sent = (GradSegment(0, whole.to(unit.plan.gradient_dtype)),)
            total = whole if len(unit.owned) == unit.layout.numel else None
            unit.grad.accumulated, unit.grad.views = None, []
            del whole  # if a 16-bit copy is sent instead, the reduction's sum can take its memory
            self._reduce(unit, sent, total)

    def _reduce(self, unit: Unit, sent: tuple[GradSegment, ...], total: Tensor | None = None) -> None:
        """Start the stages that are due, into `total` if it is given: EMPTY or ACCUMULATING -> REDUCING.

        Those of a group add to what it has accumulated in this step. The others run in the last micro-batch,
        or if none accumulates in each, and add to the sum of earlier ones.
        """
        plan, reduction, grad, device = unit.plan, self._reductions[unit], unit.grad, sent[0].flat.device
        self._reducing[self._slots[unit.number]] = unit
        begun, accumulated = list[Pending](), None
        if plan.in_groups and not (self._first and self._last and reduction.at_once):
            accumulated = grad.accumulated
            if accumulated is None:
                accumulated = torch.empty(plan.accumulator_numel, device=device)
            begun.append(reduction.accumulate(sent, accumulated, add=not self._first))
            if not self._last:
                grad.reduce(begun[0], sent, None, accumulated=accumulated)
                return
        add = bool(grad.segments)
        if add:
            total = unit.gradient
        elif total is None:
            total = torch.empty(len(unit.owned), device=device)
        squares, message = None, tuple[GradSegment, ...]()
        if self._last and not plan.quantizes_gradients:
            # A pass of quantised reductions, beside the compute, would cost more than one before the step.
            squares = torch.empty(unit.layout.shard_numel // SQUARES_BLOCK, device=device)
        target = self._target(unit, total, squares, add=add)
        if accumulated is None:
            pending = reduction.reduce(sent, target)
        else:
            pending = reduction.reduce_accumulated(accumulated, target)
        if self._last:
            pending, message = self._to_all(unit, total, pending)
        grad.reduce(all_of([*begun, pending]), sent + message, total, squares, accumulated)

    def _target(self, unit: Unit, total: Tensor, squares: Tensor | None, *, add: bool) -> Target:
        """Where the sum of a unit's shard goes, in a buffer (n,) like `unit.master`."""
        feedback = None
        if unit.residuals is not None:
            lost = unit.residuals.sent.view(-1, unit.layout.shard_numel)
            feedback = Feedback(lost, self._divisor, self._owned_gaps[unit])
        rotation = None
        if unit.plan.rotates_gradients:  # between nodes, otherwise in each step
            signs = Signs(SIGNS_SEED, unit.number, self._iteration)
            rotation = Rotation(signs, self._gaps[unit])
        return Target(total[unit.shard], add, squares, rotation, feedback)

    def _to_all(self, unit: Unit, total: Tensor, reduced: Pending) -> tuple[Pending, tuple[GradSegment, ...]]:
        """Gather the sums that this rank's optimizer takes, if they are more than its shard.

        Also returns what that sends, if it is not a part of `total`. Codes are decoded on all ranks alike, on
        the one that has made them too.
        """
        leg = self._legs[unit.number].sums
        if not leg.stages:
            return reduced, ()
        format, shard = leg.stages[0].format, total[unit.shard]
        if isinstance(format, torch.dtype):
            return leg.run(shard, total, after=reduced), ()
        codec, rotation = Codec(format, self._operations), None
        if isinstance(format, LloydMaxFormat):
            signs = Signs(_SUM_SIGNS_SEED, unit.number, self._iteration)
            rotation = Rotation(signs, self._owned_gaps[unit])
        message = torch.empty(nbytes(format, len(shard)), dtype=torch.uint8, device=total.device)

        def encode() -> None:
            reduced.wait()
            feedback = None
            if unit.residuals is not None:
                feedback = Feedback(unit.residuals.returned[None], self._divisor, self._gaps[unit])
            codec.encode(shard[None], message[None], rotation, unit.plan.shard.start, feedback)
            if feedback is not None:
                clear(feedback.lost.view(-1), feedback.gaps)

        def decode(messages: Tensor) -> None:
            codec.decode_each(messages.view(-1, len(message)), total, rotation, unit.owned.start)

        encoded = leg.first_stream.submit(encode)
        return leg.run(message, total, decode, encoded), (GradSegment(0, message),)
