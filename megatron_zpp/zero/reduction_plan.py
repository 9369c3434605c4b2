"""How gradients are summed over ranks: the algorithm, its buffers, and the bytes that it sends."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.placement import SHARD_MULTIPLE, Layout
from megatron_zpp.zero.hop import Buffer, Hop, SentBytes

CHUNKS, SMALLEST_CHUNK = 4, 2**18  # chunks of a shard at most; elements of a chunk at least


class ReductionAlgorithm(Enum):
    """How gradients are summed over all ranks: to whole sums at stage 0, else to one shard per rank."""

    LIBRARY = "all-reduce of NCCL or gloo"
    LOCAL_SUM = "every rank receives all gradients and sums them itself"
    TWO_STEP = "a reduce-scatter, and an all-gather of the sums"
    ONE_HOP = "an all-to-all over all ranks, and a sum of what arrives"
    TWO_HOPS = "ONE_HOP inside each node, then ONE_HOP of the nodes' sums between nodes"
    QUANTIZED_ONE_HOP = "ONE_HOP of block-quantised messages"
    QUANTIZED_TWO_HOPS = "TWO_HOPS of block-quantised messages, pipelined by chunk"

    @property
    def several_hops(self) -> bool:
        """Whether there is a hop inside nodes and one between them."""
        return self in (ReductionAlgorithm.TWO_HOPS, ReductionAlgorithm.QUANTIZED_TWO_HOPS)


class Accumulation(Enum):
    """Where the gradients of a step's micro-batches are added up."""

    WHOLE = "whole on every rank, in the reduction's input: one reduction per step"
    GROUP = "among the ranks of a group inside the node: hop 1 per micro-batch, the other hops once per step"
    SHARD = "in each rank's shard, in the reduction's output: one reduction per micro-batch"


@dataclass(frozen=True, kw_only=True)
class ReductionBuffers:
    """Memory that reductions share; each is of the largest unit, or chunk of a unit.

    Of `node_sums` and `received_sums` there are two, so that one is filled while the other one is sent. Where
    reductions take turns on several streams, there are as many of all buffers (`turns`).
    """

    joined: Buffer = Buffer(0, torch.uint8)  # segments of a gradient side by side; sums to be gathered
    to_send: Buffer = Buffer(0, torch.uint8)  # messages of the first hop
    received: Buffer = Buffer(0, torch.uint8)  # by the first hop; with peer writes, what other ranks write
    exact: Buffer = Buffer(0, torch.float32)  # a node's sum, where it travels in a smaller format
    folded: Buffer = Buffer(0, torch.float32)  # received by the fold: sums of the groups of a node
    node_sums: Buffer = Buffer(0, torch.uint8)
    received_sums: Buffer = Buffer(0, torch.uint8)  # by the second hop
    turns: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        once = (self.joined, self.to_send, self.received, self.exact, self.folded)
        total = self.turns * sum(buffer.nbytes for buffer in once)
        return total + 2 * (self.node_sums.nbytes + self.received_sums.nbytes)


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """How the gradients of a unit are summed over all ranks.

    `hops` has one entry, or one inside nodes and one between them. Where a node has several groups in which
    gradients accumulate, the first hop is inside a group, and `fold` is an fp32 exchange between the groups
    of a node, once per step. `compute_dtype` is the format in which a backward makes gradients and
    `gradient_dtype` the largest one in which they enter a reduction.
    """

    algorithm: ReductionAlgorithm
    hops: tuple[Hop, ...]
    layouts: tuple[Layout, ...]
    compute_dtype: torch.dtype
    gradient_dtype: torch.dtype
    accumulation: Accumulation
    fold: Hop | None
    peer_writes: bool  # whether ranks write gradients into each other's memory

    @property
    def quantized(self) -> bool:
        """Whether gradients travel as codes."""
        return self.hops[0].quantized

    @property
    def rotates(self) -> bool:
        """Whether the hop between nodes sends rotated gradients."""
        return isinstance(self.hops[-1].format, LloydMaxFormat)

    @property
    def returns_squared_norms(self) -> bool:
        """Whether the sums of squares for the gradient norm come with the sums, without a pass of their own.

        A pass of quantised reductions, beside the compute, would cost more than one before the step.
        """
        return self.algorithm in (
            ReductionAlgorithm.LOCAL_SUM,
            ReductionAlgorithm.ONE_HOP,
            ReductionAlgorithm.TWO_HOPS,
        )

    @property
    def sends_in_place(self) -> bool:
        """Whether gradients are sent and summed from where the backward made them."""
        return not self.quantized and (self.peer_writes or len(self.hops[0].ranks) == 1)

    @property
    def every_micro_batch(self) -> bool:
        """Whether gradients are sent after every backward; else once per step."""
        return self.accumulation is not Accumulation.WHOLE

    @property
    def groups(self) -> int:
        """Groups of a node whose sums the fold adds."""
        return 1 if self.fold is None else len(self.fold.ranks)

    @property
    def nodes(self) -> int:
        """Shards that the first hop sums side by side: those of the cross-node ranks."""
        return len(self.hops[1].ranks) if self.algorithm.several_hops else 1

    def accumulator_numel(self, layout: Layout) -> int:
        """Elements of a unit's gradient that this rank accumulates where it is not its shard."""
        match self.accumulation:
            case Accumulation.WHOLE:
                return layout.numel
            case Accumulation.GROUP:
                return self.groups * self.nodes * layout.shard_numel
            case Accumulation.SHARD:
                return 0

    def sent_itemsize(self, micro_batches: int) -> int:
        """Bytes per element of gradients that travel in a dtype, in a step of so many micro-batches.

        Those of a step's only micro-batch are sent as they are made, where that is smaller.
        """
        as_made = micro_batches == 1 and self.algorithm is not ReductionAlgorithm.LIBRARY
        largest = self.gradient_dtype.itemsize
        return min(largest, self.compute_dtype.itemsize) if as_made else largest

    def chunks(self, shard_numel: int) -> Iterator[range]:
        """The elements of each shard that a reduction sends together."""
        size = self._chunk_numel(shard_numel)
        for start in range(0, shard_numel, size):
            yield range(start, min(start + size, shard_numel))

    def first_element(self, shard_numel: int, chunk: range) -> int:
        """The number of the first element that this rank sends by hop 2 of a chunk: signs go by number.

        What a rank of each node sends lies together, one chunk after the other, and inside a chunk one node
        after the other. Without chunks numbers are places in the unit.
        """
        return self.nodes * (self.hops[0].group_rank * shard_numel + chunk.start)

    def bytes_sent(self, layout: Layout, micro_batches: int, *, last: bool = True) -> SentBytes:
        """Bytes that this rank sends to reduce a unit's gradient of one micro-batch.

        Where gradients accumulate in groups, all but the `last` micro-batch of a step take the first hop
        alone.
        """
        if not last and self.accumulation is not Accumulation.SHARD:
            return self._first_hop(layout, micro_batches) if self.every_micro_batch else SentBytes()
        sent = self._all_hops(layout, micro_batches)
        return sent if self.fold is None else sent + self.fold.exchange(4 * self.nodes * layout.shard_numel)

    def _first_hop(self, layout: Layout, micro_batches: int) -> SentBytes:
        """Bytes of the hop inside a group or a node."""
        first, slices = self.hops[0], self.groups * self.nodes
        if not self.quantized:
            return first.exchange(slices * layout.shard_numel * self.sent_itemsize(micro_batches))
        chunks = map(len, self.chunks(layout.shard_numel))
        messages = (self.groups * first.nbytes(self.nodes * chunk) for chunk in chunks)
        return first.exchange(sum(messages))

    def _all_hops(self, layout: Layout, micro_batches: int) -> SentBytes:
        first, shard, itemsize = self.hops[0], layout.shard_numel, self.sent_itemsize(micro_batches)
        others = len(first.ranks) - 1
        match self.algorithm:
            case ReductionAlgorithm.LIBRARY:
                return first.ring(2 * others * first.nbytes(shard))
            case ReductionAlgorithm.LOCAL_SUM:
                return first.exchange(layout.numel * itemsize)
            case ReductionAlgorithm.TWO_STEP:
                return first.exchange(shard * itemsize) + first.ring(others * first.nbytes(shard))
            case ReductionAlgorithm.ONE_HOP | ReductionAlgorithm.QUANTIZED_ONE_HOP:
                return self._first_hop(layout, micro_batches)
            case ReductionAlgorithm.TWO_HOPS | ReductionAlgorithm.QUANTIZED_TWO_HOPS:
                second = self.hops[1]
                between = sum(second.nbytes(len(chunk)) for chunk in self.chunks(shard))
                return self._first_hop(layout, micro_batches) + second.exchange(between)

    @cached_property
    def buffers(self) -> ReductionBuffers:
        """What the collectives of this reduction allocate."""
        first = self.hops[0]
        ranks, several = len(first.ranks), len(first.ranks) > 1
        numel = max(layout.numel for layout in self.layouts)
        shard = max(layout.shard_numel for layout in self.layouts)
        whole, nothing = Buffer(numel, self.gradient_dtype), Buffer(0, self.gradient_dtype)
        exchanged = whole if several and not self.peer_writes else nothing
        match self.algorithm:
            case ReductionAlgorithm.LIBRARY:  # fp32 gradients are summed where they are
                rounds = several and self.gradient_dtype != torch.float32
                return ReductionBuffers(joined=whole if rounds else nothing)
            case ReductionAlgorithm.LOCAL_SUM:
                received = Buffer(ranks * numel if several else 0, self.gradient_dtype)
                return ReductionBuffers(joined=exchanged, received=received)
            case ReductionAlgorithm.TWO_STEP:
                return ReductionBuffers(
                    joined=whole if several else nothing, received=whole if several else nothing
                )
            case ReductionAlgorithm.ONE_HOP:
                return ReductionBuffers(
                    joined=exchanged, received=whole if several else nothing, folded=self._folded(shard)
                )
            case ReductionAlgorithm.TWO_HOPS:
                sums = self.hops[1].buffer(shard, self.nodes)
                rounded = sums.dtype != torch.float32 or self.fold is not None
                return ReductionBuffers(
                    joined=whole,
                    received=Buffer(ranks * self.nodes * shard, self.gradient_dtype),
                    exact=Buffer(self.nodes * shard if rounded else 0, torch.float32),
                    folded=self._folded(shard),
                    node_sums=sums,
                    received_sums=sums,
                )
            case ReductionAlgorithm.QUANTIZED_ONE_HOP:
                messages = first.buffer(shard, ranks)
                joined = Buffer(numel, self.compute_dtype)
                return ReductionBuffers(
                    joined=joined,
                    to_send=messages,
                    received=messages,
                    folded=self._folded(shard),
                    turns=len(first.streams),
                )
            case ReductionAlgorithm.QUANTIZED_TWO_HOPS:
                chunk = self._chunk_numel(shard)
                messages = first.buffer(self.nodes * chunk, ranks)
                sums = self.hops[1].buffer(chunk, self.nodes)
                needs_sum = self.fold is not None or self.rotates
                return ReductionBuffers(
                    joined=Buffer(numel, self.compute_dtype),
                    to_send=messages,
                    received=messages,
                    exact=Buffer(self.nodes * chunk if needs_sum else 0, torch.float32),
                    folded=self._folded(chunk),
                    node_sums=sums,
                    received_sums=sums,
                )

    def _folded(self, numel: int) -> Buffer:
        """What the fold receives of so many elements of each shard."""
        return Buffer(0 if self.fold is None else self.groups * self.nodes * numel, torch.float32)

    def _chunk_numel(self, shard_numel: int) -> int:
        """Elements of a chunk.

        Hops overlap by chunk: several, so that both links are busy most of the time, but of so many elements
        that a message is worth its latency. Chunks begin where a block begins, and where signs can begin:
        at a multiple of 128 elements.
        """
        if self.algorithm is not ReductionAlgorithm.QUANTIZED_TWO_HOPS:
            return shard_numel
        multiple = max(SHARD_MULTIPLE, *(hop.code_format.block for hop in self.hops))
        wanted = max(-(-shard_numel // CHUNKS), SMALLEST_CHUNK)
        return min(-(-wanted // multiple) * multiple, shard_numel)


def choose_algorithm(stage: int, grid: Topology, *, quantized: bool) -> ReductionAlgorithm:
    """How gradients are summed over all ranks.

    Stage 0 on one node of several ranks takes an algorithm that copy engines can run. With two ranks that is
    LOCAL_SUM: it sends two thirds of TWO_STEP's bytes in 16 bits, as many in fp32, and copies no sums from a
    gather's buffer. With more ranks it would send more.

    With one hop, each rank of a node would send a gradient for every element that another node owns; with two
    hops, the node sends one sum.
    """
    local = grid.local_world_size
    several = grid.nodes > 1 and local > 1
    if quantized:
        return ReductionAlgorithm.QUANTIZED_TWO_HOPS if several else ReductionAlgorithm.QUANTIZED_ONE_HOP
    if stage == 0:
        if grid.nodes > 1 or local == 1:
            return ReductionAlgorithm.LIBRARY
        return ReductionAlgorithm.LOCAL_SUM if local == 2 else ReductionAlgorithm.TWO_STEP
    return ReductionAlgorithm.TWO_HOPS if several else ReductionAlgorithm.ONE_HOP


def may_write_peers(grid: Topology, algorithm: ReductionAlgorithm) -> bool:
    """Whether gradients could be written into the memory of all ranks that need them: those of one node."""
    exchanges = (ReductionAlgorithm.LOCAL_SUM, ReductionAlgorithm.TWO_STEP, ReductionAlgorithm.ONE_HOP)
    return grid.nodes == 1 < grid.world_size and algorithm in exchanges
