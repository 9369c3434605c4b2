"""How the weights and gradients of a unit travel, and what a rank holds of them, as values."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.rooms import Buffer, accumulating, widest
from megatron_zpp.exchange.route import (
    Route,
    SentBytes,
    When,
    as_made,
    axes_of,
    gradient_route,
    nbytes,
    sent,
    sum_route,
    weight_route,
)
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.placement import Layout


@dataclass(frozen=True)
class UnitPlan:
    """How the weights and gradients of units of one layout travel, and what a rank holds of them.

    The states of the optimizer are cut over `axes`: all axes of the layout; none at stage 0, where every rank
    changes all weights; or those inside nodes, where each node holds the unit by itself. A backward makes
    gradients in the format `made`, and they enter a reduction, or are encoded, in `gradient_dtype` at most.
    `gradients` sums them over the axes of the layout, and `sums` brings the sums to ranks that hold the same
    states. `bring` runs once per step, after the update: it fills what is kept on this rank. `fill` fills the
    slot, from what is kept if something is, whenever the slot does not have the weights. All but `gradients`
    are legs; a route that is empty does nothing.
    """

    layout: Layout
    mesh: Mesh
    axes: tuple[Axis, ...]
    made: torch.dtype
    gradient_dtype: torch.dtype
    gradients: Route
    sums: Route
    bring: Route
    fill: Route
    dtype: torch.dtype  # of what is read in the slot; bytes where weights are held as codes
    in_turn: bool  # whether other units take turns in the slot

    @cached_property
    def shard(self) -> range:
        """The elements of the unit whose gradients this rank sums."""
        return self.layout.shard(self.mesh)

    @cached_property
    def owned(self) -> range:
        """The elements that this rank's optimizer changes."""
        (owned,) = self.layout.ranges(self.mesh, self.axes)
        return owned

    @cached_property
    def every_micro_batch(self) -> bool:
        """Whether gradients are summed over ranks after every backward; else once per step.

        One rank alone adds up the micro-batches in the sum that the optimizer takes.
        """
        return not self.gradients or self.gradients[0].when is When.MICRO_BATCH

    @cached_property
    def in_groups(self) -> bool:
        """Whether every micro-batch is summed in a group alone."""
        return accumulating(self.gradients) > 0

    @cached_property
    def quantizes_gradients(self) -> bool:
        """Whether gradients travel as codes. Else the squares for the norm come with the sums."""
        return any(stage.codes for stage in self.gradients)

    @cached_property
    def rotates_gradients(self) -> bool:
        """Whether gradients are rotated before they cross nodes."""
        return bool(self.gradients) and isinstance(self.gradients[-1].format, LloydMaxFormat)

    @cached_property
    def accumulator_numel(self) -> int:
        """Elements that this rank accumulates of the gradient, beside what the optimizer takes."""
        early = accumulating(self.gradients)
        if self.every_micro_batch and not early:
            return 0
        cut = axes_of(self.gradients[:early])  # over which groups have summed
        return sum(map(len, self.layout.ranges(self.mesh, cut)))

    @property
    def first(self) -> Route:
        """The leg that sends what the optimizer has written; empty if it writes all weights in place."""
        return self.bring or self.fill

    @property
    def differences(self) -> LloydMaxFormat | None:
        """The format in which weight differences travel to a reference; None where weights travel."""
        format = self.bring[0].format if self.bring and self.bring[0].verb == "difference" else None
        return format if isinstance(format, LloydMaxFormat) else None

    @property
    def codes(self) -> QuantFormat | None:
        """The format in which weights travel as block codes; None where they do not."""
        format = self.first[0].format if self.first else None
        return format if isinstance(format, QuantFormat) else None

    @property
    def decodes(self) -> bool:
        """Whether messages are decoded, or applied to a reference."""
        return bool(self.first) and self.first[0].codes

    @property
    def kept_elements(self) -> range:
        """The elements of the unit that this rank keeps: a secondary shard, or part of the reference."""
        if not self.bring:
            return range(0)
        (kept,) = self.layout.ranges(self.mesh, axes_of(self.fill))
        return kept

    @property
    def holders(self) -> list[int]:
        """For each rank of the job, the first one that keeps the same elements."""
        axes = axes_of(self.bring)
        return [self.mesh.at(rank).ranks(*axes)[0] for rank in range(self.mesh.world_size)]

    @cached_property
    def memory(self) -> dict[str, tuple[Route, Buffer]]:
        """Memory of the unit beside its slot, and the leg that sends or fills it.

        What is `kept` is a part of the slot where no other unit overwrites it; a reference, fp32, never is.
        The `gather_source` has what the optimizer writes for others: weights, a message, or fp32 weights to
        subtract a reference from. Weights that travel as they are lie in what their leg fills, so that no
        rank has them twice. The `message` has weight differences, of any step, and `codes` those of the
        reference, for `fill` to gather. Every rank must allocate it in this order.
        """
        found, numel, kept = dict[str, tuple[Route, Buffer]](), len(self.owned), len(self.kept_elements)
        if (differs := self.differences) is not None:
            found["kept"] = self.fill, Buffer(kept, torch.float32)
            found["gather_source"] = self.first, Buffer(numel, torch.float32)
            if self.layout.coded and self.in_turn:
                found["codes"] = self.fill, Buffer(kept, torch.uint8)
            found["message"] = self.bring, Buffer(nbytes(widest(differs), numel), torch.uint8)
            return found
        if self.bring and self.in_turn:
            found["kept"] = self.fill, Buffer(kept, self.dtype)
        if self.codes is not None:
            found["gather_source"] = self.first, Buffer(self.codes.message_bytes(numel), torch.uint8)
        elif self.in_turn and not self.bring:
            found["gather_source"] = self.first, Buffer(numel, self.dtype)
        return found

    @property
    def residuals(self) -> tuple[Buffer, ...]:
        """What codes have lost, with error feedback: of what this rank sends, and of the sum of its shard."""
        if not any(stage.feedback for stage in self.sums):
            return ()
        return tuple(Buffer(len(elements), torch.bfloat16) for elements in (self.owned, self.shard))

    @property
    def slot(self) -> Buffer:
        return Buffer(self.layout.numel, self.dtype)

    @property
    def sent_bytes(self) -> int:
        """Bytes of what is sent of one unit, where that is not a part of other memory."""
        names = ("gather_source",) if self.differences is None else ("message", "codes")
        return sum(buffer.nbytes for name, (_, buffer) in self.memory.items() if name in names)

    @property
    def brought(self) -> SentBytes:
        """Bytes that this rank sends in `bring`."""
        held = len(self.owned) // self.layout.shard_numel
        return sent(self.bring, self.layout, self.mesh, held=held)

    @property
    def filled(self) -> SentBytes:
        """Bytes that this rank sends in `fill`."""
        held = len(self.kept_elements or self.owned) // self.layout.shard_numel
        return sent(self.fill, self.layout, self.mesh, held=held)

    def reduced(self, micro_batches: int, *, last: bool) -> SentBytes:
        """Bytes that this rank sends to reduce the unit in one micro-batch, a step's `last` one or not."""
        route = as_made(self.gradients, self.made, micro_batches)
        if not last:
            return sent(route, self.layout, self.mesh, when=(When.MICRO_BATCH,))
        return sent(route, self.layout, self.mesh) + sent(self.sums, self.layout, self.mesh)


def unit_plan(
    zero: ZeroConfig,
    mesh: Mesh,
    layout: Layout,
    compute_dtype: torch.dtype,
    *,
    axes: tuple[Axis, ...],
    in_turn: bool,
    reduce_in_bf16: bool,
) -> UnitPlan:
    """The plan of units of a layout; `compute_dtype` is what weights are read in if they are not codes.

    `axes`: the first ones of the layout, over which the states are cut.
    """
    zero = zero.among(layout.shards)
    gradients = gradient_route(zero, mesh, compute_dtype, layout.axes, in_bf16=reduce_in_bf16)
    gradient_dtype = compute_dtype
    if gradients:
        summed = torch.float32 if gradients[0].when is When.STEP else compute_dtype  # over micro-batches
        gradient_dtype = torch.bfloat16 if reduce_in_bf16 else summed
    dtype = torch.uint8 if layout.coded else compute_dtype
    if layout.coded and not zero.sends_differences:  # codes travel as they are
        zero = replace(zero, zero_quantized_weights=False)
    bring, fill = weight_route(zero, mesh, dtype, axes)
    others = layout.axes[len(axes) :]
    sums = sum_route(zero, axes, others, of_matrices=bool(layout.hull(of_matrices=True)))
    return UnitPlan(
        layout, mesh, axes, compute_dtype, gradient_dtype, gradients, sums, bring, fill, dtype, in_turn
    )
