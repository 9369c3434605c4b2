"""A unit, parameters that are gathered together, as this rank holds it.

The tensors of a unit of n elements (padding included) on d ranks:

    tensor         changed by  what it is
    full           prefetch    (n,) compute dtype: the buffer of the unit's slot, which the module's
                               parameters view for good; units with the same slot take turns in it. Bytes
                               where weights are held as codes
    gather_source  optimizer   what this rank's next gather sends: its shard in the compute dtype or as bytes,
                               or qwZ's message; a part of `kept` or `full`, if they are filled once per step.
                               Where differences are sent: its shard in fp32, as they are computed from
    master         optimizer   fp32 weights that this rank's optimizer changes: all n at stage 0, else its
                               shard (n / d,); in CPU memory if offloaded; in fp32 the gather source itself.
                               With --main-params-dtype bf16+8 bytes, which with the gather source are the
                               weights (ops/state_codes.py)
    moments        optimizer   two of AdamW, like `master`; the optimizer's own `states`
    kept           weights     this rank's part of what its group keeps of the unit: hpZ's secondary shard, or
                               where weight differences are sent of the reference, fp32, which is what all
                               nodes know of the weights. None where nothing is kept
    message        weights     the weight differences that this rank sends
    encoded        weights     where weights are held as codes: the bytes that this rank writes of the unit,
                               and what they are codes of. `gather_source` and `master`; where differences
                               are sent, the bytes that its group gathers from it, and the reference
    residuals      gradients   what codes have lost of gradients, where that is sent later: see Residuals
    accumulated    gradients   fp32, the sum over micro-batches from a step's first to its last: (n,) where
                               gradients accumulate whole, (n / N,) where groups of N ranks accumulate them
    segments       gradients   the gradient that the optimizer takes, like `master`, in one part or several:
                               the fp32 sum over micro-batches and ranks, from a step's first reduction until
                               the optimizer is done; where there is nothing to sum, as the backward made it
    squares        gradients   sums of the squares of each block of `segments`, where a reduction finds them
    sent           gradients   what the reduction under way reads

The last four belong to the unit's `grad`.

A `Unit` itself never changes. prefetch.py keeps where its weights are (`WeightState`). How far its gradient
has come is in `grad`, which gradients.py alone changes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.exchange.segments import GradSegment, segments_inside
from megatron_zpp.placement import Layout, Placement, within
from megatron_zpp.zero.held_states import WEIGHTS, HeldStates
from megatron_zpp.zero.read_guard import ReadGuard
from megatron_zpp.zero.unit_plan import UnitPlan


class GradientState(Enum):
    """How far the gradient of a unit has come in a step.

    EMPTY -> ACCUMULATING -> REDUCING -> SUMMED -> EMPTY where gradients accumulate whole. Where they
    accumulate in groups: EMPTY -> REDUCING (in the group) -> ACCUMULATING for each micro-batch but the last,
    which is REDUCING -> SUMMED. Where they are reduced after every micro-batch: EMPTY -> REDUCING -> SUMMED,
    and REDUCING again for the next one. Where there is nothing to sum over data ranks: EMPTY -> SUMMED, after
    REDUCING where tensor ranks have a sum under way.
    """

    EMPTY = auto()
    ACCUMULATING = auto()  # `accumulated` is this rank's or group's sum over the micro-batches so far
    REDUCING = auto()  # `pending` sums `sent` over ranks into `segments`, or in a group into `accumulated`
    SUMMED = auto()  # `segments` are over all ranks, and of the micro-batches so far


@dataclass(eq=False)
class UnitGradient:
    """The gradient of a unit in the present step. gradients.py alone changes it."""

    # Of this backward, by the parameter's number in the unit; None when the reduction has them all
    arrived: dict[int, Tensor] | None = None
    accumulated: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)  # of it, where gradients accumulate whole: `Unit.views`
    segments: tuple[GradSegment, ...] = ()
    squares: Tensor | None = None
    sent: tuple[GradSegment, ...] = ()
    pending: Pending | None = None

    @property
    def state(self) -> GradientState:
        if self.pending is not None:
            return GradientState.REDUCING
        if self.segments:
            return GradientState.SUMMED
        return GradientState.EMPTY if self.accumulated is None else GradientState.ACCUMULATING

    def reduce(
        self,
        pending: Pending,
        sent: tuple[GradSegment, ...],
        total: Tensor | None,
        squares: Tensor | None = None,
        accumulated: Tensor | None = None,
    ) -> None:
        """Own what a submitted reduction uses: EMPTY, ACCUMULATING or SUMMED -> REDUCING.

        Without a `total` it is one in a group alone, into `accumulated`.
        """
        assert self.pending is None
        self.pending, self.sent = pending, sent
        self.segments = () if total is None else (GradSegment(0, total),)
        self.accumulated, self.squares = accumulated, squares

    def wait(self) -> None:
        """Let the compute wait for a reduction under way: REDUCING -> SUMMED, or ACCUMULATING in a group."""
        if self.pending is not None:
            self.pending.wait()
            self.pending, self.sent = None, ()
            if self.segments:
                self.accumulated = None

    def release(self) -> None:
        """Give the memory back: any state but REDUCING -> EMPTY."""
        assert self.pending is None
        self.accumulated, self.views, self.segments, self.squares = None, [], (), None


class Residuals(NamedTuple):
    """What codes have lost of a unit's gradient, in bf16, which later messages have too (codecs.Feedback)."""

    sent: Tensor  # of the sums of this rank's node, of the elements that this rank sends: `owned`
    returned: Tensor  # of the sum over nodes, of this rank's shard


class Encoded(NamedTuple):
    """What a rank encodes of a unit whose weights are held as codes. An element stands for a byte."""

    elements: range  # of the unit
    weights: Tensor  # (n,) fp32
    codes: Tensor  # (n,) bytes

    def parts(self, layout: Layout) -> Iterator[tuple[str, slice]]:
        """The coded parameters of which a part is among the `elements`, and which of these it is."""
        for piece in layout.pieces_in(self.elements):
            if piece.placement.coded:
                yield piece.placement.name, within(piece.at, self.elements)


@dataclass(frozen=True, eq=False, kw_only=True)
class Unit:
    """Parameters that are gathered together, as this rank holds them."""

    number: int  # among all units, in forward order
    parameters: tuple[nn.Parameter, ...]
    layout: Layout
    plan: UnitPlan
    full: Tensor
    master: Tensor
    gather_source: Tensor
    kept: Tensor | None
    message: Tensor | None
    encoded: Encoded | None
    residuals: Residuals | None
    gaps: tuple[slice, ...]  # elements of `kept` that belong to no parameter
    guard: ReadGuard  # of all of them
    grad: UnitGradient = field(default_factory=UnitGradient)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(placement.name for placement in self.layout.placements)

    @cached_property
    def shard(self) -> slice:
        """Where this rank's shard is in a buffer like `master`; the rest of it other ranks hold as well."""
        return within(self.plan.shard, self.owned)

    @property
    def owned(self) -> range:
        return self.plan.owned

    @property
    def frozen(self) -> bool:
        """Whether its parameters are gathered and not trained: no gradient, no optimizer state."""
        return self.layout.frozen

    @property
    def reference(self) -> Tensor:
        """What is kept, where weight differences are sent."""
        assert self.kept is not None
        return self.kept

    @cached_property
    def own_kept(self) -> Tensor:
        """This rank's shard in what is kept."""
        assert self.kept is not None
        return self.kept[within(self.owned, self.plan.kept_elements)]

    @property
    def gradient(self) -> Tensor:
        """The gradient that the optimizer takes, where it is in one segment."""
        ((_, flat),) = self.grad.segments
        return flat

    @property
    def reads_master(self) -> bool:
        """Whether modules read the master weights themselves, all of which this rank's optimizer changes."""
        same = self.full.data_ptr() == self.master.data_ptr()
        return same and len(self.full) == len(self.master)

    def set_readable(self, readable: bool) -> None:
        """Let modules read the parameters from now on, or no more. Raises RuntimeError if one was changed."""
        if not readable and not self.reads_master:
            self.guard.check_unwritten()
        self.guard.set_readable(readable)

    @property
    def is_split(self) -> bool:
        """Whether the master weights are the gather source and, in `master`, a byte beside each."""
        return self.master.dtype == torch.uint8

    @property
    def weights(self) -> HeldStates:
        """The `owned` master weights."""
        return HeldStates(WEIGHTS, *((self.gather_source, self.master) if self.is_split else (self.master,)))

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a buffer (n,), each in its parameter's shape."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.layout.offsets, self.parameters, strict=True)
        ]

    def view_in(self, segments: Iterable[GradSegment], index: int) -> Tensor:
        """Where `segments` of the unit's whole gradient have that of a parameter."""
        offset, parameter = self.layout.offsets[index], self.parameters[index]
        (part,) = segments_inside(segments, range(offset, offset + parameter.numel()))
        return part.flat.view(parameter.shape)

    def fill(self, flat: Tensor, elements: range, whole: Callable[[Placement], Tensor]) -> None:
        """Fill some `elements`, a buffer (n,), with this rank's parts of whole parameters, of any device."""
        for piece in self.layout.pieces_in(elements):
            values, owned = whole(piece.placement), flat[within(piece.at, elements)]
            for block in piece.blocks(self.plan.mesh.rank):
                part = owned[within(block.elements, piece.elements)].view(block.shape)
                for here, there in block.parts:
                    part[here].copy_(values[there])

    @cached_property
    def decayed(self) -> int:
        """How many of the `owned` elements, the first ones, have weight decay."""
        pieces = self.layout.pieces_in(self.owned)
        others = (piece.at.start for piece in pieces if not piece.placement.decays)
        return next(others, self.owned.stop) - self.owned.start
