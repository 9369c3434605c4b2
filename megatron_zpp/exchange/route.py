"""Routes: how the weights or the gradients of a unit travel, as values.

A route is a tuple of stages. A stage over an axis of one rank sends nothing, and has been dropped, unless it
rounds the weights that are kept, or is the only one that fills a slot from other memory.

    gathers      begin with a shard, and each brings the parts of its axes together: node, then inside nodes
    reductions   begin with a whole gradient, and each leaves the sum of this rank's part: inside nodes, then
                 between them

`When` is residency. What gathers have brought once per step stays, cut over the axes of the later ones; what
reductions have summed after every micro-batch is accumulated, cut over the axes so far.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Literal, cast

import torch

from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import GRADIENT_BLOCK, ROTATED_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.ops.formats import CodeType, LloydMaxFormat, QuantFormat
from megatron_zpp.placement import SHARD_MULTIPLE, Layout

CodeFormat = QuantFormat | LloydMaxFormat
Format = torch.dtype | CodeFormat
CHUNKS, SMALLEST_CHUNK = 4, 2**18  # chunks of a shard at most; elements of a chunk at least


class When(IntEnum):
    """How often a stage runs."""

    USE = 0  # whenever a pass reads the unit and its slot has another one
    MICRO_BATCH = 1  # whenever a backward has made the gradient
    STEP = 2  # once per step


@dataclass(frozen=True)
class Stage:
    """One exchange among the ranks of `axes`, of elements in one format.

    difference: an all-gather of codes of what weights have changed by, which are added to a reference.
    `feedback`: what codes lose of units with residuals is sent with the next message (codecs.Feedback).
    """

    verb: Literal["gather", "difference", "reduce"]
    axes: tuple[Axis, ...]
    format: Format
    when: When
    feedback: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks in a group of the stage."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def codes(self) -> bool:
        """Whether elements travel as codes."""
        return not isinstance(self.format, torch.dtype)


Route = tuple[Stage, ...]


def eight_bits(format: LloydMaxFormat) -> QuantFormat:
    """The format of weight differences that need more bits than Lloyd-Max codes have."""
    return QuantFormat("int8", format.block)


@dataclass(frozen=True)
class SentBytes:
    """Bytes sent to ranks of the same node, and to ranks of other nodes."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: int) -> "SentBytes":
        return SentBytes(self.intra * times, self.inter * times)


def axes_of(route: Route) -> tuple[Axis, ...]:
    return tuple(axis for stage in route for axis in stage.axes)


def plain(format: Format) -> torch.dtype:
    """The same, of elements that do not travel as codes."""
    assert isinstance(format, torch.dtype)
    return format


@cache
def nbytes(format: Format, numel: int) -> int:
    """Bytes of `numel` elements as they travel together."""
    return numel * format.itemsize if isinstance(format, torch.dtype) else format.message_bytes(numel)


def check_routes(zero: ZeroConfig, mesh: Mesh) -> None:
    """Raise ValueError, with the sizes that would be valid, for flags for which `mesh` has no route."""
    local = mesh.replicas.size
    zero.hpz_ranks(local)
    zero.gradient_ranks(local)
    if not zero.sends_differences:
        return
    flag, format = "--zero-quantized-weights-format", zero.zero_quantized_weights_format
    if mesh.nodes == 1:
        fix = "needs 2 or more nodes; on one node use int8, or omit --zero-quantized-weights"
        raise option_error(flag, format, fix)
    if not zero.holds_references(local):
        divisors = [str(size) for size in range(2, local + 1) if local % size == 0]
        fix = (
            f"--zero-hpz-partition-size {', '.join(['auto', *divisors])}; not {zero.zero_hpz_partition_size}"
        )
        what = f"needs groups inside a node of {local} data ranks, each of which keeps a reference"
        raise option_error(flag, format, f"{what}: {fix}")


def weight_route(
    zero: ZeroConfig, mesh: Mesh, dtype: torch.dtype, axes: Sequence[Axis]
) -> tuple[Route, Route]:
    """How new weights of a unit reach the slots of all ranks; `dtype` is that of the compute.

    Returns the leg that brings what stays on a rank beside the slot, which is empty where nothing stays, and
    the leg that fills the slot. `axes`: those over which the states of the unit are cut, both of its layout
    or the one inside nodes.

    With hpZ, groups are made of ranks of a node that are evenly spread over it: what the ranks between two of
    them own is contiguous, and is what each of them keeps.
    """
    format: Format = dtype
    differs = zero.sends_differences and axes[1:] != () and axes[1].size > 1
    if zero.zero_quantized_weights and (differs or not zero.sends_differences):
        format = code_format(zero.zero_quantized_weights_format, WEIGHT_BLOCK)
    use = When.USE if zero.zero_stage == 3 else When.STEP
    if not (differs or (zero.hpz and zero.zero_stage == 3 and len(axes) > 1)):
        stages = [Stage("gather", (axis,), format, use) for axis in reversed(axes)]
        return (), _live(stages) or tuple(stages[-1:] if use is When.USE else [])
    inside, node = axes
    group = inside.size
    if zero.zero_stage == 3:
        group = math.gcd(zero.hpz_ranks(mesh.replicas.size), group)
    members, between = inside.cut(inside.size // group)
    verb: Literal["gather", "difference"] = "difference" if differs else "gather"
    kept = [Stage(verb, (axis,), format, When.STEP) for axis in (node, between)]
    rounded = tuple(kept[:1]) if kept[0].codes else ()  # by one rank too, so that bits are the same
    return _live(kept) or rounded, (Stage("gather", (members,), dtype, use),)


def gradient_route(
    zero: ZeroConfig, mesh: Mesh, dtype: torch.dtype, axes: Sequence[Axis], *, in_bf16: bool
) -> Route:
    """How gradients are summed, to a shard on each rank; `dtype` is that in which they are made.

    `axes`: those of the unit's layout, inside nodes and between them. Formats are the largest of any step:
    see `as_made`.
    """
    inside_node, node = axes
    group = zero.gradient_ranks(mesh.replicas.size)
    if group is not None:
        group = math.gcd(group, inside_node.size)
    whole = (group is None and zero.zero_stage < 2) or group == 1  # accumulates on every rank
    first, last = When.STEP if whole else When.MICRO_BATCH, When.STEP
    if group is None or group == inside_node.size * node.size:
        last = first
    between: Format = torch.bfloat16 if in_bf16 else torch.float32
    inside: Format = between if whole else torch.bfloat16 if in_bf16 else dtype
    if zero.zero_quantized_gradients:
        inside = between = gradient_format(zero)
        if zero.rotates_gradients:
            inside = QuantFormat("int8", GRADIENT_BLOCK)
    groups, places = inside_node.cut(inside_node.size if group in (None, 1) else group)
    stages = [
        Stage("reduce", (places,), inside, first),
        Stage("reduce", (groups,), torch.float32, When.STEP),
        Stage("reduce", (node,), between, last),
    ]
    if inside_node.size == 1 and not zero.zero_quantized_gradients:
        stages[-1] = replace(stages[-1], format=inside)  # nothing has been summed before
    return _live(stages)


def sum_route(zero: ZeroConfig, axes: Sequence[Axis], others: Sequence[Axis], *, of_matrices: bool) -> Route:
    """How the sums of gradients reach ranks that hold the same states, which are cut over `axes` alone.

    `others`: the other axes of the layout.

    Between nodes that hold a unit by themselves they travel in the format of quantised gradients. Four bits
    have error feedback where the unit is `of_matrices`: Muon enlarges what codes do to small singular values.
    """
    format: Format = torch.float32
    feedback = False
    if axes and zero.zero_quantized_gradients:
        format = gradient_format(zero)
        feedback = of_matrices and format.bits == 4
    return _live([Stage("gather", (axis,), format, When.STEP, feedback) for axis in reversed(others)])


def gradient_format(zero: ZeroConfig) -> CodeFormat:
    """The format of quantised gradients between nodes."""
    block = ROTATED_BLOCK if zero.rotates_gradients else GRADIENT_BLOCK
    return code_format(zero.zero_quantized_gradients_format, block)


def as_made(route: Route, dtype: torch.dtype, micro_batches: int) -> Route:
    """The route of a step: gradients of its only micro-batch travel as they are made, if that is smaller."""
    if micro_batches > 1 or not route or route[0].codes:
        return route
    smaller = min(plain(route[0].format), dtype, key=lambda each: each.itemsize)
    return (replace(route[0], format=smaller), *route[1:])


def code_format(name: str, block: int) -> QuantFormat | LloydMaxFormat:
    """The format of a name: delta4 and rotated4 are Lloyd-Max codes of 4 bits, others a QuantFormat's."""
    if name.startswith(("delta", "rotated")):
        return LloydMaxFormat(int(name[-1]), block)
    return QuantFormat(cast(CodeType, name), block)


def chunks(route: Route, shard: int) -> list[range]:
    """The elements of each shard, of so many, that the reductions of a route send together.

    Stages of codes overlap by chunk: several, so that all links are busy most of the time, but of so many
    elements that a message is worth its latency. Chunks begin where a block begins, and where signs can
    begin: at a multiple of 128 elements.
    """
    coded = [stage for stage in route if stage.codes]
    size = shard
    if len(coded) > 1:
        multiple = max(SHARD_MULTIPLE, *(cast(CodeFormat, stage.format).block for stage in coded))
        wanted = max(-(-shard // CHUNKS), SMALLEST_CHUNK)
        size = min(-(-wanted // multiple) * multiple, shard)
    return [range(start, min(start + size, shard)) for start in range(0, shard, size)]


def sent(
    route: Route, layout: Layout, mesh: Mesh, *, when: Collection[When] = tuple(When), held: int = 1
) -> SentBytes:
    """Bytes that this rank sends in the stages of a route that run at these times, once each.

    `held`: shards that this rank has of the unit before the first gather, which makes one message of them.
    """
    total, cut, messages = SentBytes(), list[Axis](), 1
    for stage in route:
        peers = _peers(mesh, stage.axes, ring=stage.verb != "reduce")
        if stage.verb == "reduce":
            cut += stage.axes
            part = _reduced_bytes(stage, route, layout, mesh, cut)
        else:
            part = (stage.ranks - 1) * messages * nbytes(stage.format, held * layout.shard_numel)
            messages *= stage.ranks
        total += peers * part if stage.when in when else SentBytes()
    return total


def _reduced_bytes(stage: Stage, route: Route, layout: Layout, mesh: Mesh, cut: Sequence[Axis]) -> int:
    """Bytes that a reduction sends to each rank: of the unit cut over its axes and earlier ones, `cut`.

    Codes have a message for each run of shards that lie together, chunk by chunk.
    """
    runs = [len(run) // layout.shard_numel for run in layout.ranges(mesh, cut)]
    if not stage.codes:
        return nbytes(stage.format, sum(runs) * layout.shard_numel)
    return sum(
        nbytes(stage.format, run * len(chunk)) for chunk in chunks(route, layout.shard_numel) for run in runs
    )


@cache
def _peers(mesh: Mesh, axes: tuple[Axis, ...], *, ring: bool) -> SentBytes:
    """A byte to each rank that this one sends to over `axes`: to the next of a ring, or to all others."""
    group = mesh.ranks(*axes)
    place = group.index(mesh.rank)
    others = (*group[place + 1 :], *group[:place])[: 1 if ring else None]
    near = sum(mesh.share_a_node((mesh.rank, rank)) for rank in others)
    return SentBytes(near, len(others) - near)


def _live(stages: Sequence[Stage]) -> Route:
    return tuple(stage for stage in stages if stage.ranks > 1)
