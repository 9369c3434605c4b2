"""Memory that the stages of routes need, as values: the same that a run allocates and a plan adds up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_zpp.exchange.route import Format, Route, When, axes_of, chunks, eight_bits, nbytes
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.placement import Layout


class Buffer(NamedTuple):
    """Memory for `numel` elements: the arguments of `CommStream.zeros`."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def lanes(route: Route, at: int, mesh: Mesh) -> int:
    """How many streams stage `at` of a route has: two between nodes where exchanges can take turns on them.

    Over TCP one communicator does not fill a link between nodes, and one exchange is on the wire while the
    messages of another are encoded or decoded.
    """
    stage = route[at]
    takes_turns = stage.verb == "difference" or (stage.verb == "reduce" and (stage.codes or len(route) > 1))
    return 2 if takes_turns and not mesh.share_a_node(mesh.ranks(*stage.axes)) else 1


class HopRoom(NamedTuple):
    """Bytes that one lane of a stage sends from, and receives into."""

    sent: int
    received: int


@dataclass(frozen=True, kw_only=True)
class ReductionRooms:
    """The buffers of a reduction, each for the largest unit or chunk.

    A reduction in several stages that end between nodes has `near` hops, and a `far` one with two lanes.
    Other reductions have near hops alone, in as many `turns` as the first one has lanes.
    """

    joined: int  # elements in `dtype`: the segments of a gradient side by side
    dtype: torch.dtype
    turns: int
    near: tuple[HopRoom, ...]
    far: HopRoom | None
    exact: int  # fp32 elements of a turn: the sums of a node, where they are encoded or rounded to travel

    @property
    def nbytes(self) -> int:
        once = self.joined * self.dtype.itemsize + sum(map(sum, self.near))
        return self.turns * (once + 4 * self.exact) + 2 * sum(self.far or ())


def reduction_rooms(
    route: Route, layouts: Sequence[Layout], mesh: Mesh, made: torch.dtype, *, peer_writes: bool
) -> ReductionRooms:
    """The buffers of the reductions of a route; `made` is the format in which a backward makes gradients.

    `peer_writes`: ranks write what they send into each other's memory, which a stage alone can do.
    """
    first, numel = route[0].format, max(layout.numel for layout in layouts)
    hops = [_hop_room(route, at, layouts, mesh) for at in range(len(route))]
    far = hops.pop() if len(route) > 1 and lanes(route, len(route) - 1, mesh) > 1 else None
    held = max(len(chunks(route, layout.shard_numel)[0]) for layout in layouts)
    last = route[-1].format
    sums = far is not None and last != torch.float32 and not fused(route)  # of a node, to encode
    corrected = route[-1].feedback and isinstance(last, QuantFormat)  # what is encoded, in a room of its own
    return ReductionRooms(
        joined=0 if peer_writes else numel,
        dtype=first if isinstance(first, torch.dtype) else made,
        turns=lanes(route, 0, mesh) if len(route) == 1 else 1,
        near=tuple(hops),
        far=far,
        exact=held * route[-1].ranks if sums or corrected else 0,
    )


def fused(route: Route) -> bool:
    """Whether the messages of a node are decoded, summed and encoded again in one pass."""
    coded = all(isinstance(stage.format, QuantFormat) for stage in route)
    return len(route) == 2 and coded and not route[-1].feedback


def accumulating(route: Route) -> int:
    """How many reductions of a route run after every micro-batch, if others run once per step; else 0."""
    early = sum(stage.when is When.MICRO_BATCH for stage in route)
    return early if early < len(route) else 0


def _hop_room(route: Route, at: int, layouts: Sequence[Layout], mesh: Mesh) -> HopRoom:
    stage = route[at]
    cut = axes_of(route[: at + 1])
    room = max(
        stage.ranks
        * nbytes(stage.format, len(layout.ranges(mesh, cut)[0]) // layout.shard_numel * len(chunk))
        for layout in layouts
        for chunk in chunks(route, layout.shard_numel)
    )
    sends = stage.codes or (at + 1 == len(route) > 1 and lanes(route, at, mesh) > 1)
    return HopRoom(room if sends else 0, room)


def widest(format: Format) -> Format:
    """The format of the largest message of any step: raised units send more bits."""
    return eight_bits(format) if isinstance(format, LloydMaxFormat) else format
