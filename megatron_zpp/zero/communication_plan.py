"""How the weights and gradients of a run travel: decided once, on values alone.

`plan_communication` makes the plan of one rank from the configuration, the grid and the layouts of the
units. It needs no tensors and no process groups, so one process can plan for every rank of any grid. The
engine builds its streams, collectives and buffers from the plan, --dry-run reads the same plan, and tests
compare the traffic ledger with it.

    collective              group                      algorithm
    gather of weights       all ranks                  all-gather; on several nodes of several ranks in two
                                                       hops, between nodes and then inside them
    secondary gather (hpZ)  --zero-hpz-partition-size  all-gather
    reduction of gradients  see ReductionAlgorithm     one of ReductionAlgorithm
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import GRADIENT_BLOCK, ROTATED_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.hop import Buffer, Codes, Hop, Sent, WireFormat, make_hop
from megatron_zpp.zero.reduction_plan import (
    Accumulation,
    ReductionPlan,
    choose_algorithm,
    may_write_peers,
)


@dataclass(frozen=True)
class Residency:
    """What a ZeRO stage leaves whole on every rank (ZeRO paper, section 5)."""

    stage: int

    @property
    def optimizer_sharded(self) -> bool:
        """Stage 1 and up: master weights and moments."""
        return self.stage >= 1

    @property
    def parameters_sharded(self) -> bool:
        """Stage 3: the compute-precision parameters."""
        return self.stage >= 3


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """How the parts of a unit that the ranks of a group hold become the whole unit: an all-gather.

    A part has `shards` shards: one in the gather over all ranks, more in a group that holds the unit as well.
    A quantised part has a message for each of its shards.
    """

    hop: Hop
    shards: int
    kept: int  # index of the part of the whole that becomes this rank's secondary shard
    layouts: tuple[FlatLayout, ...]

    def part(self, layout: FlatLayout) -> Buffer:
        """What this rank sends of a unit."""
        return self.hop.buffer(layout.shard_numel, self.shards)

    @cached_property
    def largest_part(self) -> Buffer:
        """What this rank sends of the largest unit."""
        return max(map(self.part, self.layouts), key=lambda part: part.nbytes)

    @cached_property
    def received(self) -> Buffer:
        """All messages of the largest unit. Parts in a dtype are received where the parameters are."""
        if not self.hop.quantized:
            return Buffer(0, torch.uint8)
        messages = len(self.hop.ranks) * self.shards
        return self.hop.buffer(max(layout.shard_numel for layout in self.layouts), messages)

    def bytes_sent(self, layout: FlatLayout) -> Sent:
        """Bytes that this rank sends in one gather of a unit."""
        return self.hop.ring((len(self.hop.ranks) - 1) * self.part(layout).nbytes)


@dataclass(frozen=True, kw_only=True)
class CommunicationPlan:
    """How the weights and gradients of this rank's run travel, and the memory that this takes.

    `slots` has the slot of each unit, in forward order: the buffer that holds its gathered parameters. Units
    with equal slots have equal layouts and take turns. Units with equal `reduction_slots` have one reduction
    under way at a time. `streams` has the ranks of each communication stream; every rank makes its streams in
    this order. `slot_stream` is the stream in whose memory slots lie.
    """

    grid: Topology
    residency: Residency
    layouts: tuple[FlatLayout, ...]
    compute_dtype: torch.dtype
    streams: tuple[tuple[int, ...], ...]
    gather: GatherPlan  # over all ranks; or between nodes, where `inside_gather` is its second hop
    inside_gather: GatherPlan | None  # the parts that the nodes sent, inside the node
    secondary: GatherPlan | None  # hpZ
    reduction: ReductionPlan
    prefetch: int  # units gathered ahead of the one that computes
    slots: tuple[int, ...]
    slot_stream: int
    reduction_slots: tuple[int, ...]

    @property
    def shard(self) -> int:
        """The index of the shard that this rank owns of each unit."""
        return self.grid.shard_of(self.grid.rank)

    @property
    def sends_from_slots(self) -> bool:
        """Whether a gather sends a part of the slot that it fills, so that no rank keeps its shard twice."""
        return not self.residency.parameters_sharded and not self.gather.hop.quantized

    @property
    def gathers_in_place(self) -> bool:
        """Whether the optimizer writes all of a unit into its slot, so that nothing has to be gathered."""
        whole = not self.residency.optimizer_sharded or self.grid.world_size == 1
        return whole and self.sends_from_slots

    def secondary_part(self, layout: FlatLayout) -> Buffer | None:
        """This rank's secondary shard of a unit; None where it has none.

        Units that do not take turns in slots are gathered once per step and need none.
        """
        if self.difference_format is not None:
            return Buffer(self.grid.nodes * layout.shard_numel, torch.float32)
        if self.secondary is None or layout not in self._layouts_in_turn:
            return None
        return self.secondary.part(layout)

    def reference_elements(self, layout: FlatLayout) -> range:
        """The elements of a unit that this rank and its cross-node ranks own."""
        first = self.grid.local_rank * self.grid.nodes * layout.shard_numel
        return range(first, first + self.grid.nodes * layout.shard_numel)

    @property
    def difference_format(self) -> LloydMaxFormat | None:
        """The format in which weight differences cross nodes; None where weights themselves travel."""
        format = self.gather.hop.format
        return format if isinstance(format, LloydMaxFormat) else None

    def gather_source(self, layout: FlatLayout) -> Buffer:
        """What the optimizer writes of a unit for others: a part of a gather, or fp32 weights to compare."""
        if self.difference_format is not None:
            return Buffer(layout.shard_numel, torch.float32)
        return self.gather.part(layout)

    def sums_gradients(self, micro_batches: int, *, accepts_16bit: bool) -> bool:
        """Whether the optimizer takes fp32 sums, and not the gradients of a step's only micro-batch as made.

        `accepts_16bit`: whether the optimizer takes gradients in 16 bits.
        """
        alone = self.grid.world_size == 1 and not self.reduction.quantized
        return not (alone and micro_batches == 1 and accepts_16bit)

    def with_peer_writes(self, possible: bool) -> "CommunicationPlan":
        """The plan where ranks of a node can, or cannot, write each other's memory."""
        writes = possible and may_write_peers(self.grid, self.reduction.algorithm)
        writes = writes and self.reduction.fold is None
        return replace(self, reduction=replace(self.reduction, peer_writes=writes))

    @property
    def fills_secondary(self) -> bool:
        """Whether the hop between nodes fills the secondary shards, from which the node gathers the unit.

        They are the same part of a unit where an hpZ group is a node.
        """
        inside, secondary = self.inside_gather, self.secondary
        return inside is not None and secondary is not None and inside.hop.ranks == secondary.hop.ranks

    def gather_bytes_sent(self, layout: FlatLayout) -> Sent:
        """Bytes that this rank sends to gather new weights of a unit."""
        if self.difference_format is not None:
            return self.gather.bytes_sent(layout) + self.secondary.bytes_sent(layout)
        if self.inside_gather is None:
            return self.gather.bytes_sent(layout)
        through_secondary = self.fills_secondary and self.secondary_part(layout) is not None
        inside = self.secondary if through_secondary else self.inside_gather
        return self.gather.bytes_sent(layout) + inside.bytes_sent(layout)

    def gather_decodes(self, layout: FlatLayout) -> int:
        """Elements that this rank decodes to gather new weights of a unit."""
        if self.difference_format is not None:
            return self.grid.nodes * layout.shard_numel
        if self.gather.hop.quant_format is None:
            return 0
        through_secondary = self.fills_secondary and self.secondary_part(layout) is not None
        if through_secondary and self.secondary.hop.quant_format is None:
            return layout.numel // self.grid.local_world_size
        return layout.numel

    @property
    def weight_bytes(self) -> int:
        """Bytes of slots, and of what this rank's gathers send where that is not a part of them."""
        slots = {slot: layout.numel for slot, layout in zip(self.slots, self.layouts, strict=True)}
        total = sum(slots.values()) * self.compute_dtype.itemsize
        if not self.sends_from_slots:
            total += sum(self.gather.part(layout).nbytes for layout in self.layouts)
        return total

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the sums of gradients over micro-batches that this rank keeps during a step.

        `Accumulation.SHARD` keeps them in the gradient that the optimizer takes.
        """
        return 4 * sum(map(self.reduction.accumulator_numel, self.layouts))

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of gathers and reductions."""
        gathers = self.relayed.nbytes
        gathers += (self.inside_gather or self.gather).received.nbytes
        if self.secondary is not None and self.secondary != self.inside_gather:  # else they share theirs
            gathers += self.secondary.received.nbytes
        return gathers + self.reduction.buffers.nbytes

    @property
    def relayed(self) -> Buffer:
        """Two parts of the largest unit in turn: messages on their way from other nodes."""
        if self.inside_gather is None or not self.gather.hop.quantized:
            return Buffer(0, torch.uint8)
        part = self.inside_gather.largest_part
        return Buffer(2 * part.numel, part.dtype)

    @property
    def secondary_bytes(self) -> int:
        """Bytes of all secondary shards of this rank."""
        return sum(part.nbytes for part in map(self.secondary_part, self.layouts) if part is not None)

    @cached_property
    def _layouts_in_turn(self) -> set[FlatLayout]:
        """Layouts of which there are more units than slots."""
        slots = Counter(layout for layout, _ in {*zip(self.layouts, self.slots, strict=True)})
        return {layout for layout, units in Counter(self.layouts).items() if slots[layout] < units}


def plan_communication(
    zero: ZeroConfig,
    grid: Topology,
    layouts: Sequence[FlatLayout],
    *,
    compute_dtype: torch.dtype,
    reduce_in_bf16: bool,
    copy_engines: bool,
) -> CommunicationPlan:
    """The plan of rank `grid.rank` for units of these layouts.

    Weights travel in `compute_dtype` or quantised. Gradients travel quantised, in bf16 (`reduce_in_bf16`) or
    in the dtype that `_gradient_dtype` chooses. `copy_engines` says whether these move what ranks of one node
    send.
    """
    residency, layouts = Residency(zero.zero_stage), tuple(layouts)
    streams: list[tuple[int, ...]] = []

    def new_stream(ranks: Sequence[int]) -> int:
        streams.append(tuple(ranks))
        return len(streams) - 1

    def hop(stream: int, format: WireFormat) -> Hop:
        return make_hop(grid, stream, streams[stream], format)

    def gather(stream: int, format: WireFormat, shards: int) -> GatherPlan:
        return GatherPlan(hop=hop(stream, format), shards=shards, kept=kept, layouts=layouts)

    group = zero.hpz_ranks(grid.local_world_size, grid.nodes)
    kept = grid.rank % group
    weight_format: WireFormat = compute_dtype
    if zero.zero_quantized_weights:
        weight_format = code_format(
            zero.zero_quantized_weights_format, zero.zero_quantization_block or WEIGHT_BLOCK
        )
    inside_gather = secondary = None
    if isinstance(weight_format, LloydMaxFormat):
        weights = gather(new_stream(grid.cross_node_ranks), weight_format, 1)
        slot_stream = new_stream(grid.node_ranks)
        secondary = gather(slot_stream, compute_dtype, grid.nodes)
    elif grid.nodes > 1 and grid.local_world_size > 1:
        weights = gather(new_stream(grid.cross_node_ranks), weight_format, 1)
        slot_stream = new_stream(grid.node_ranks)
        inside_gather = gather(slot_stream, weight_format, grid.nodes)
    else:
        slot_stream = new_stream(range(grid.world_size))
        weights = gather(slot_stream, weight_format, 1)
    if zero.hpz and secondary is None:
        ranks = tuple(grid.neighbours(group))
        inside = slot_stream if streams[slot_stream] == ranks else new_stream(ranks)
        keeps_messages = zero.zero_hpz_secondary == "quantized"
        secondary = gather(
            inside, weight_format if keeps_messages else compute_dtype, grid.world_size // group
        )
        # where a gather lands without a copy by the compute
        if zero.zero_quantized_weights or not (copy_engines and grid.nodes == 1 < grid.world_size):
            slot_stream = inside

    accumulation = choose_accumulation(zero, grid)
    gradient_dtype = _gradient_dtype(accumulation, compute_dtype, reduce_in_bf16)
    algorithm = choose_algorithm(zero.zero_stage, grid, quantized=zero.zero_quantized_gradients)
    first_format: WireFormat = gradient_dtype
    second_format: WireFormat = _sum_dtype(reduce_in_bf16)
    if zero.zero_quantized_gradients:
        first_format, second_format = _gradient_codes(zero)
    fold = None
    if accumulation is Accumulation.GROUP:
        group = zero.gradient_ranks(grid.local_world_size)
        hops = (hop(new_stream(grid.neighbours(group)), first_format),)
        if group < grid.local_world_size:
            fold = hop(new_stream(grid.group_peers(group)), torch.float32)
    elif algorithm.several_hops:
        hops = (hop(new_stream(grid.node_ranks), first_format),)
    else:
        between = zero.zero_quantized_gradients and grid.nodes > 1
        hops = (hop(new_stream(range(grid.world_size)), second_format if between else first_format),)
    if algorithm.several_hops:
        hops = (*hops, hop(new_stream(grid.cross_node_ranks), second_format))
    return CommunicationPlan(
        grid=grid,
        residency=residency,
        layouts=layouts,
        compute_dtype=compute_dtype,
        streams=tuple(streams),
        gather=weights,
        inside_gather=inside_gather,
        secondary=secondary,
        reduction=ReductionPlan(
            algorithm=algorithm,
            hops=hops,
            layouts=layouts,
            compute_dtype=compute_dtype,
            gradient_dtype=gradient_dtype,
            accumulation=accumulation,
            fold=fold,
            peer_writes=copy_engines and may_write_peers(grid, algorithm) and fold is None,
        ),
        prefetch=zero.zero_prefetch_units or 0,  # None below stage 3, where no gather is ahead of its unit
        slots=tuple(_slots(layouts, zero.zero_prefetch_units if residency.parameters_sharded else None)),
        slot_stream=slot_stream,
        reduction_slots=tuple(_slots(layouts, 1)),  # two per layout
    )


def check_topology(zero: ZeroConfig, topology: Topology) -> None:
    """Raises ValueError, with the sizes that would do, for ZeRO++ flags that these ranks cannot obey."""
    hpz_ranks = zero.hpz_ranks(topology.local_world_size, topology.nodes)
    gradient_ranks = zero.gradient_ranks(topology.local_world_size)
    if zero.sends_differences:
        _check_differences(zero, topology, hpz_ranks)
    if zero.hpz and gradient_ranks and hpz_ranks % gradient_ranks and gradient_ranks % hpz_ranks:
        sizes = [n for n in _divisors(topology.local_world_size) if hpz_ranks % n == 0 or n % hpz_ranks == 0]
        raise option_error(
            "--zero-gradient-partition-size",
            gradient_ranks,
            f"does not nest with --zero-hpz-partition-size {hpz_ranks}; one group must hold whole groups of "
            f"the other: {', '.join(map(str, sizes))}",
        )


def _check_differences(zero: ZeroConfig, topology: Topology, hpz_ranks: int) -> None:
    flag, format = "--zero-quantized-weights-format", zero.zero_quantized_weights_format
    if topology.nodes == 1:
        raise option_error(
            flag, format, "needs 2 or more nodes, since it saves nothing inside one; int8 does"
        )
    if zero.zero_stage >= 3 and hpz_ranks != topology.local_world_size:
        raise option_error(
            flag,
            format,
            f"needs groups that are a node of {topology.local_world_size} ranks, since each node keeps one "
            f"reference: --zero-hpz-partition-size auto, not {zero.zero_hpz_partition_size}",
        )


def code_format(name: str, block: int) -> Codes:
    """The format of a name: `delta4` and `rotated4` are Lloyd-Max codes of 4 bits, others a QuantFormat's."""
    if name.startswith(("delta", "rotated")):
        return LloydMaxFormat(int(name[-1]), block)
    return QuantFormat(name, block)


def _gradient_codes(zero: ZeroConfig) -> tuple[Codes, Codes]:
    """The formats of gradients inside nodes, and between them.

    Rotated codes are for slow links. Inside nodes 8 bits lose less, and cost less to encode.
    """
    block, name = zero.zero_quantization_block, zero.zero_quantized_gradients_format
    if not zero.rotates_gradients:
        format = code_format(name, block or GRADIENT_BLOCK)
        return format, format
    return QuantFormat("int8", block or GRADIENT_BLOCK), code_format(name, block or ROTATED_BLOCK)


def choose_accumulation(zero: ZeroConfig, grid: Topology) -> Accumulation:
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


def _sum_dtype(in_bf16: bool) -> torch.dtype:
    """The format in which a node's sums of gradients travel to other nodes: 16 bits would round them."""
    return torch.bfloat16 if in_bf16 else torch.float32


def _slots(layouts: Sequence[FlatLayout], prefetch: int | None) -> Iterator[int]:
    """A slot for each unit. Units of equal layout share `prefetch` + 1 in turn; None: each has its own."""
    if prefetch is None:
        yield from range(len(layouts))
        return
    slots: dict[FlatLayout, list[int]] = {}  # those of a layout
    turns: Counter[FlatLayout] = Counter()
    count = 0
    for layout in layouts:
        own = slots.setdefault(layout, [])
        if len(own) <= prefetch:
            own.append(count)
            count += 1
        yield own[turns[layout] % (prefetch + 1)]
        turns[layout] += 1
