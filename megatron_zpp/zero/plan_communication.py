"""Decides how the weights and gradients of a run travel: from the configuration, the grid and the layouts.

One process can plan for every rank of any grid.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import cast

import torch

from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import GRADIENT_BLOCK, ROTATED_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.formats import CodeType, LloydMaxFormat, QuantFormat
from megatron_zpp.placement import Layout
from megatron_zpp.zero.communication_plan import CommunicationPlan, GatherPlan
from megatron_zpp.zero.hop import CodeFormat, Hop, WireFormat
from megatron_zpp.zero.reads import Reads
from megatron_zpp.zero.reduction_plan import (
    Accumulation,
    ReductionPlan,
    choose_algorithm,
    may_write_peers,
)


def plan_communication(
    zero: ZeroConfig,
    grid: Topology,
    layouts: Sequence[Layout],
    *,
    compute_dtype: torch.dtype,
    reduce_in_bf16: bool,
    copy_engines: bool,
    reads: Reads | None = None,
) -> CommunicationPlan:
    """The plan of rank `grid.rank` for units of these layouts.

    Weights travel in `compute_dtype` or quantised. Gradients travel quantised, in bf16 (`reduce_in_bf16`) or
    in the dtype that `_gradient_dtype` chooses. `copy_engines` says whether these move what ranks of one node
    send. `reads`: how the passes read the units; by default each once in the forward and in the backward.
    """
    zero = zero.among(grid.world_size)
    layouts, streams = tuple(layouts), _Streams(grid)
    gathers = _plan_gathers(zero, streams, layouts, compute_dtype, copy_engines=copy_engines)
    trained = tuple(layout for layout in layouts if not layout.frozen)
    reduction = _plan_reduction(
        zero, streams, trained, compute_dtype, in_bf16=reduce_in_bf16, copy_engines=copy_engines
    )
    reads = reads or Reads(tuple((unit,) for unit in range(len(layouts))))
    forward, _ = orders = reads.orders
    return CommunicationPlan(
        grid=grid,
        optimizer_sharded=zero.zero_stage >= 1,
        parameters_sharded=zero.zero_stage >= 3,
        layouts=layouts,
        compute_dtype=compute_dtype,
        streams=tuple(streams.ranks),
        gather=gathers.weights,
        inside_gather=gathers.inside,
        secondary=gathers.secondary,
        among_groups=gathers.among_groups,
        reduction=reduction,
        prefetch=zero.prefetched_units,
        slots=tuple(_slots(layouts, orders, zero.prefetched_units if zero.zero_stage >= 3 else None)),
        slot_stream=gathers.slot_stream,
        reduction_slots=tuple(_slots(layouts, (forward,), 1)),  # for two units in a row
        reads=reads,
    )


class _Streams:
    """The communication streams of a plan, in the order in which all ranks make them."""

    def __init__(self, grid: Topology) -> None:
        self.grid = grid
        self.ranks: list[tuple[int, ...]] = []

    def new(self, ranks: Sequence[int]) -> int:
        """The index of a new stream."""
        self.ranks.append(tuple(ranks))
        return len(self.ranks) - 1

    def in_turn(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The indices of new streams on which the exchanges of these ranks take turns, if nodes differ."""
        first = self.new(ranks)
        if len({self.grid.node_of(rank) for rank in ranks}) == 1:
            return (first,)
        return (first, self.new(ranks))

    def hop(self, streams: int | tuple[int, ...], format: WireFormat) -> Hop:
        """A hop on one stream, or on several in turn."""
        indices = (streams,) if isinstance(streams, int) else streams
        grid, ranks = self.grid, self.ranks[indices[0]]
        group_rank, node = ranks.index(grid.rank), grid.node_of(grid.rank)
        return Hop(
            streams=indices,
            ranks=ranks,
            group_rank=group_rank,
            format=format,
            neighbours=sum(grid.node_of(rank) == node for rank in ranks) - 1,
            next_is_near=grid.node_of(ranks[(group_rank + 1) % len(ranks)]) == node,
        )


@dataclass(frozen=True, kw_only=True)
class _Gathers:
    """See the fields of CommunicationPlan."""

    weights: GatherPlan
    inside: GatherPlan | None
    secondary: GatherPlan | None
    slot_stream: int
    among_groups: GatherPlan | None = None


def _plan_gathers(
    zero: ZeroConfig,
    streams: _Streams,
    layouts: tuple[Layout, ...],
    compute_dtype: torch.dtype,
    *,
    copy_engines: bool,
) -> _Gathers:
    grid = streams.grid
    group = zero.hpz_ranks(grid.local_world_size)

    def gather(stream: int | tuple[int, ...], format: WireFormat, shards: int) -> GatherPlan:
        return GatherPlan(
            hop=streams.hop(stream, format), shards=shards, kept=grid.rank % group, layouts=layouts
        )

    format: WireFormat = compute_dtype
    if zero.zero_quantized_weights:
        format = _code_format(zero.zero_quantized_weights_format, WEIGHT_BLOCK)
    if isinstance(format, LloydMaxFormat):
        weights = gather(streams.in_turn(grid.cross_node_ranks), format, 1)
        groups = grid.local_world_size // group if zero.zero_stage >= 3 else 1
        among_groups = None
        if groups > 1:
            stream = streams.new(grid.neighbours(groups))
            among_groups = gather(stream, format, grid.nodes)
        slot_stream = streams.new(grid.group_peers(groups))
        secondary = gather(slot_stream, compute_dtype, groups * grid.nodes)
        return _Gathers(
            weights=weights,
            inside=None,
            secondary=secondary,
            slot_stream=slot_stream,
            among_groups=among_groups,
        )
    inside = None
    if grid.nodes > 1 and grid.local_world_size > 1:
        weights = gather(streams.new(grid.cross_node_ranks), format, 1)
        slot_stream = streams.new(grid.node_ranks)
        inside = gather(slot_stream, format, grid.nodes)
    else:
        slot_stream = streams.new(range(grid.world_size))
        weights = gather(slot_stream, format, 1)
    if not zero.hpz:
        return _Gathers(weights=weights, inside=inside, secondary=None, slot_stream=slot_stream)
    ranks = tuple(grid.neighbours(group))
    secondary_stream = slot_stream if streams.ranks[slot_stream] == ranks else streams.new(ranks)
    secondary = gather(secondary_stream, compute_dtype, grid.world_size // group)
    # where a gather lands without a copy by the compute
    if zero.zero_quantized_weights or not (copy_engines and grid.nodes == 1 < grid.world_size):
        slot_stream = secondary_stream
    return _Gathers(weights=weights, inside=inside, secondary=secondary, slot_stream=slot_stream)


def _plan_reduction(
    zero: ZeroConfig,
    streams: _Streams,
    layouts: tuple[Layout, ...],
    compute_dtype: torch.dtype,
    *,
    in_bf16: bool,
    copy_engines: bool,
) -> ReductionPlan:
    grid, quantized = streams.grid, zero.zero_quantized_gradients
    accumulation = _choose_accumulation(zero, grid)
    algorithm = choose_algorithm(zero.zero_stage, grid, quantized=quantized)
    gradient_dtype = _gradient_dtype(accumulation, compute_dtype, in_bf16)
    inside: WireFormat = gradient_dtype
    between: WireFormat = torch.bfloat16 if in_bf16 else torch.float32  # of sums, which 16 bits round
    if quantized:
        inside, between = _gradient_codes(zero)
    fold = None
    if accumulation is Accumulation.GROUP:
        group = zero.gradient_ranks(grid.local_world_size)
        assert group is not None
        hops: tuple[Hop, ...] = (streams.hop(streams.new(grid.neighbours(group)), inside),)
        if group < grid.local_world_size:
            fold = streams.hop(streams.new(grid.group_peers(group)), torch.float32)
    elif algorithm.several_hops:
        hops = (streams.hop(streams.new(grid.node_ranks), inside),)
    else:
        only = between if quantized and grid.nodes > 1 else inside
        everyone = range(grid.world_size)
        hops = (streams.hop(streams.in_turn(everyone) if quantized else streams.new(everyone), only),)
    if algorithm.several_hops:
        hops = (*hops, streams.hop(streams.in_turn(grid.cross_node_ranks), between))
    return ReductionPlan(
        algorithm=algorithm,
        hops=hops,
        layouts=layouts,
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        accumulation=accumulation,
        fold=fold,
        peer_writes=copy_engines and may_write_peers(grid, algorithm) and fold is None,
    )


def check_topology(zero: ZeroConfig, topology: Topology) -> None:
    """Raise ValueError, with the sizes that would be valid, for ZeRO++ flags that these ranks cannot obey."""
    hpz_ranks = zero.hpz_ranks(topology.local_world_size)
    gradient_ranks = zero.gradient_ranks(topology.local_world_size)
    if zero.sends_differences:
        _check_differences(zero, topology)
    if zero.hpz and gradient_ranks and hpz_ranks % gradient_ranks and gradient_ranks % hpz_ranks:
        sizes = [n for n in _divisors(topology.local_world_size) if hpz_ranks % n == 0 or n % hpz_ranks == 0]
        raise option_error(
            "--zero-gradient-partition-size",
            gradient_ranks,
            f"does not nest with --zero-hpz-partition-size {hpz_ranks}; one group must hold whole groups of "
            f"the other: {', '.join(map(str, sizes))}",
        )


def _check_differences(zero: ZeroConfig, topology: Topology) -> None:
    flag, format = "--zero-quantized-weights-format", zero.zero_quantized_weights_format
    if topology.nodes == 1:
        raise option_error(
            flag, format, "needs 2 or more nodes; on one node use int8, or omit --zero-quantized-weights"
        )
    local = topology.local_world_size
    if not zero.holds_references(local):
        sizes = ", ".join(["auto", *(str(size) for size in _divisors(local) if size > 1)])
        raise option_error(
            flag,
            format,
            f"needs groups inside a node of {local} data ranks, each of which keeps a reference: "
            f"--zero-hpz-partition-size {sizes}; not {zero.zero_hpz_partition_size}",
        )


def _code_format(name: str, block: int) -> CodeFormat:
    """The format of a name: `delta4` and `rotated4` are Lloyd-Max codes of 4 bits, others a QuantFormat's."""
    if name.startswith(("delta", "rotated")):
        return LloydMaxFormat(int(name[-1]), block)
    return QuantFormat(cast(CodeType, name), block)


def _gradient_codes(zero: ZeroConfig) -> tuple[CodeFormat, CodeFormat]:
    """The formats of gradients inside nodes, and between them.

    Rotated codes are for slow links. Inside nodes 8 bits lose less, and cost less to encode.
    """
    name = zero.zero_quantized_gradients_format
    if not zero.rotates_gradients:
        format = _code_format(name, GRADIENT_BLOCK)
        return format, format
    return QuantFormat("int8", GRADIENT_BLOCK), _code_format(name, ROTATED_BLOCK)


def _choose_accumulation(zero: ZeroConfig, grid: Topology) -> Accumulation:
    """Where the gradients of a step's micro-batches are added up.

    A group of all ranks is what stages 2 and 3 have anyway, and a group of one rank is what stage 1 has.
    """
    ranks = zero.gradient_ranks(grid.local_world_size)
    if ranks is None:
        return Accumulation.SHARD if zero.zero_stage >= 2 else Accumulation.WHOLE
    if ranks == grid.world_size:
        return Accumulation.SHARD
    return Accumulation.WHOLE if ranks == 1 else Accumulation.GROUP


def _gradient_dtype(accumulation: Accumulation, compute_dtype: torch.dtype, in_bf16: bool) -> torch.dtype:
    """The format in which gradients enter a reduction.

    Gradients that are reduced after each backward are sent in the format that it made them in, which loses
    nothing because the sums are fp32. Sums over micro-batches need fp32, unless bf16 is asked for.
    """
    if in_bf16:
        return torch.bfloat16
    return torch.float32 if accumulation is Accumulation.WHOLE else compute_dtype


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _slots(
    layouts: Sequence[Layout], orders: Sequence[Sequence[tuple[int, ...]]], ahead: int | None
) -> Iterator[int]:
    """A slot for each unit; None: each has its own.

    Units of equal layout take turns in as many as they are, at most, among the units of any place and of the
    `ahead` places with other units that follow it in one of the `orders` in which units are read.
    """
    if ahead is None:
        yield from range(len(layouts))
        return
    numbers: dict[Layout, int] = {}
    kinds = [numbers.setdefault(layout, len(numbers)) for layout in layouts]
    most = [1] * len(numbers)
    for order in orders:
        for at in range(len(order)):
            near = dict.fromkeys(order[at : at + 2 * (ahead + 1)])  # no order has a unit more than twice
            units = chain.from_iterable(islice(near, ahead + 1))
            for kind, count in Counter(kinds[unit] for unit in units).items():
                most[kind] = max(most[kind], count)
    slots: list[list[int]] = [[] for _ in most]  # those of a layout
    turns, made = Counter[int](), 0
    for kind in kinds:
        if len(slots[kind]) < most[kind]:
            slots[kind].append(made)
            made += 1
        yield slots[kind][turns[kind] % most[kind]]
        turns[kind] += 1
