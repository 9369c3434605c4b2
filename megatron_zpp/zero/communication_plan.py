"""How the weights and gradients of a run travel, as values.

A plan needs no tensors and no process groups. The engine builds its streams, collectives and buffers from it,
--dry-run reads the same plan, and tests compare the traffic ledger with it.

    collective              group                      algorithm
    gather of weights       all ranks                  all-gather; on several nodes of several ranks in two
                                                       hops, between nodes and then inside them; of weight
                                                       differences, between nodes and, if a node has several
                                                       hpZ groups, among the ranks of equal group rank
    secondary gather (hpZ)  --zero-hpz-partition-size  all-gather
    reduction of gradients  see ReductionAlgorithm     one of ReductionAlgorithm

zero/plan_communication.py decides.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.placement import Layout
from megatron_zpp.zero.hop import Buffer, Hop, SentBytes, eight_bits
from megatron_zpp.zero.reads import Reads
from megatron_zpp.zero.reduction_plan import ReductionPlan, may_write_peers


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """How the parts of a unit that the ranks of a group hold become the whole unit: an all-gather.

    A part has `shards` shards: one in the gather over all ranks, more in a
    group that holds the unit as well. A quantised part has a message for each of its shards. Units with
    weights that are held as codes travel as the bytes that they are, whatever the hop's format, but for
    differences of weights.
    """

    hop: Hop
    shards: int
    kept: int  # index of the part of the whole that becomes this rank's secondary shard
    layouts: tuple[Layout, ...]

    def part(self, layout: Layout) -> Buffer:
        """What this rank sends of a unit."""
        return self._buffer(self.hop, layout)

    def room(self, layout: Layout) -> Buffer:
        """Memory for what this rank sends of a unit in any step."""
        return self._buffer(self._widest, layout)

    def _buffer(self, hop: Hop, layout: Layout) -> Buffer:
        if layout.coded and not isinstance(self.hop.format, LloydMaxFormat):
            return Buffer(self.shards * layout.shard_numel, torch.uint8)
        return hop.buffer(layout.shard_numel, self.shards)

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
        return self._widest.buffer(max(layout.shard_numel for layout in self.layouts), messages)

    @property
    def _widest(self) -> Hop:
        """The hop with the largest format of any step: raised units send more than others."""
        format = self.hop.format
        if not isinstance(format, LloydMaxFormat):
            return self.hop
        return replace(self.hop, format=eight_bits(format))

    def bytes_sent(self, layout: Layout) -> SentBytes:
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
    optimizer_sharded: bool  # stage 1 and up: master weights and moments (ZeRO paper, section 5)
    parameters_sharded: bool  # stage 3: the parameters as they compute
    layouts: tuple[Layout, ...]
    compute_dtype: torch.dtype
    streams: tuple[tuple[int, ...], ...]
    gather: GatherPlan  # over all ranks; or between nodes, where `inside_gather` is its second hop
    inside_gather: GatherPlan | None  # the parts that the nodes sent, inside the node
    secondary: GatherPlan | None  # hpZ
    among_groups: GatherPlan | None  # messages of weight differences, to the other groups of a node
    reduction: ReductionPlan
    prefetch: int  # units gathered ahead of the one that computes
    slots: tuple[int, ...]
    slot_stream: int
    reduction_slots: tuple[int, ...]
    reads: Reads

    def owned(self, layout: Layout) -> range:
        """The elements of a unit that this rank's optimizer changes."""
        return layout.shard(self.grid.mesh) if self.optimizer_sharded else range(layout.numel)

    @property
    def sends_from_slots(self) -> bool:
        """Whether a gather sends a part of the slot that it fills, so that no rank keeps its shard twice."""
        return not self.parameters_sharded and not self.gather.hop.quantized

    def slot(self, layout: Layout) -> Buffer:
        """The memory of a slot for units of this layout."""
        return Buffer(layout.numel, torch.uint8 if layout.coded else self.compute_dtype)

    @property
    def secondary_gather(self) -> GatherPlan:
        """`secondary` of a plan that has secondary shards."""
        assert self.secondary is not None
        return self.secondary

    @property
    def gathers_in_place(self) -> bool:
        """Whether the optimizer writes all of a unit into its slot, so that nothing has to be gathered."""
        whole = not self.optimizer_sharded or self.grid.world_size == 1
        return whole and self.sends_from_slots

    def secondary_part(self, layout: Layout) -> Buffer | None:
        """This rank's secondary shard of a unit; None where it has none.

        Units that do not take turns in slots are gathered once per step and need none.
        """
        if self.difference_format is not None:
            return Buffer(len(self.reference_elements(layout)), torch.float32)
        if self.secondary is None or layout not in self._layouts_in_turn:
            return None
        return self.secondary.part(layout)

    def reference_codes(self, layout: Layout) -> Buffer | None:
        """The codes of this rank's part of the reference, where weights are held as codes; else None.

        None also where the rank writes them into the unit's slot, which no other unit takes.
        """
        if self.difference_format is None or not layout.coded or layout not in self._layouts_in_turn:
            return None
        return self.secondary_gather.part(layout)

    def reference_elements(self, layout: Layout) -> range:
        """The elements of a unit whose reference this rank holds; none where weights themselves travel.

        With one group to a node, what it and its cross-node ranks own.
        """
        if self.difference_format is None:
            return range(0)
        part = self.secondary_gather.shards * layout.shard_numel
        first = self.secondary_gather.hop.group_rank * part
        return range(first, first + part)

    @property
    def reference_groups(self) -> int:
        """The groups of a node that have a reference each: rank r is in group r modulo their number.

        So what the ranks of one group rank own is contiguous, and is the part whose reference they hold.
        """
        return 1 if self.among_groups is None else len(self.among_groups.hop.ranks)

    @property
    def difference_format(self) -> LloydMaxFormat | None:
        """The format in which weight differences cross nodes; None where weights themselves travel.

        A few units have more bits in a few steps, see `DifferenceFormats`.
        """
        format = self.gather.hop.format
        return format if isinstance(format, LloydMaxFormat) else None

    def gather_source(self, layout: Layout) -> Buffer:
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

    @property
    def reduces_places(self) -> bool:
        """Whether the gradients of a unit with several places are reduced place by place, as they are made.

        Otherwise they are added when the last of them is there, and reduced once.
        """
        return self.grid.world_size > 1 and self.reduction.every_micro_batch

    def reductions(self, unit: int) -> int:
        """How often a backward reduces the gradient of a unit where it does so after every micro-batch."""
        return len(self.reads.places[unit]) if self.reduces_places else 1

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

    def gather_bytes_sent(self, layout: Layout) -> SentBytes:
        """Bytes that this rank sends to gather new weights of a unit."""
        if self.difference_format is not None:
            among = SentBytes() if self.among_groups is None else self.among_groups.bytes_sent(layout)
            return self.gather.bytes_sent(layout) + among + self.secondary_gather.bytes_sent(layout)
        if self.inside_gather is None:
            return self.gather.bytes_sent(layout)
        through_secondary = self.fills_secondary and self.secondary_part(layout) is not None
        inside = self.secondary_gather if through_secondary else self.inside_gather
        return self.gather.bytes_sent(layout) + inside.bytes_sent(layout)

    def gather_decodes(self, layout: Layout) -> int:
        """Elements that this rank decodes to gather new weights of a unit."""
        if self.difference_format is not None:
            return len(self.reference_elements(layout))
        if self.gather.hop.quant_format is None:
            return 0
        if self.fills_secondary and self.secondary_part(layout) is not None:
            return layout.numel // self.grid.local_world_size
        return layout.numel

    @property
    def weight_bytes(self) -> int:
        """Bytes of slots, and of what this rank's gathers send where that is not a part of them."""
        slots = {slot: self.slot(layout) for slot, layout in zip(self.slots, self.layouts, strict=True)}
        total = sum(buffer.nbytes for buffer in slots.values())
        if not self.sends_from_slots:
            total += sum(self.gather.room(layout).nbytes for layout in self.layouts)
        own = map(self.reference_codes, self.layouts)
        return total + sum(codes.nbytes for codes in own if codes is not None)

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the sums of gradients over micro-batches that this rank keeps during a step.

        `Accumulation.SHARD` keeps them in the gradient that the optimizer takes.
        """
        return 4 * sum(map(self.reduction.accumulator_numel, self.reduction.layouts))

    @property
    def arena_bytes(self) -> int:
        """Bytes of the buffers of gathers and reductions."""
        gathers = self.relayed.nbytes
        weights = self.inside_gather or self.gather
        gathers += len(weights.hop.streams) * weights.received.nbytes
        if self.among_groups is not None:
            gathers += self.among_groups.received.nbytes
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
    def _layouts_in_turn(self) -> set[Layout]:
        """Layouts of which there are more units than slots."""
        slots = Counter(layout for layout, _ in {*zip(self.layouts, self.slots, strict=True)})
        return {layout for layout, units in Counter(self.layouts).items() if slots[layout] < units}
