"""How gradients are summed over ranks: the algorithm, its buffers, and the bytes that it sends."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property

import torch

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.hop import Buffer, Hop, Sent

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


@dataclass(frozen=True, kw_only=True)
class ReductionBuffers:
    """Memory that reductions share; each is of the largest unit, or chunk of a unit."""

    joined: Buffer = Buffer(0, torch.uint8)  # segments of a gradient side by side; sums to be gathered
    to_send: Buffer = Buffer(0, torch.uint8)  # messages of the first hop
    received: Buffer = Buffer(0, torch.uint8)  # by the first hop; with peer writes, what other ranks write
    exact: Buffer = Buffer(0, torch.float32)  # a node's sum, where it travels in a smaller format
    node_sums: Buffer = Buffer(0, torch.uint8)  # a node's sums, twice, so that one is filled and one is sent
    received_sums: Buffer = Buffer(0, torch.uint8)  # by the second hop

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(getattr(self, one.name).nbytes for one in fields(self)) + self.node_sums.nbytes


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """How the gradients of a unit are summed over all ranks.

    `hops` has one entry, or one inside nodes and one between them. `compute_dtype` is the format in which a
    backward makes gradients and `gradient_dtype` the largest one in which they enter a reduction.
    """

    algorithm: ReductionAlgorithm
    hops: tuple[Hop, ...]
    layouts: tuple[FlatLayout, ...]
    compute_dtype: torch.dtype
    gradient_dtype: torch.dtype
    every_micro_batch: bool  # else gradients accumulate whole, and are reduced once per step
    error_feedback: bool
    peer_writes: bool  # whether ranks write gradients into each other's memory

    @property
    def quant_format(self) -> QuantFormat | None:
        """The format of quantised messages; None where gradients travel in a dtype."""
        return self.hops[0].quant_format

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
        return self.quant_format is None and (self.peer_writes or len(self.hops[0].ranks) == 1)

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

    def error_numel(self, layout: FlatLayout) -> int:
        """Elements of a unit that the second hop can lose on this rank."""
        if self.algorithm is not ReductionAlgorithm.QUANTIZED_TWO_HOPS:
            return 0
        return len(self.hops[1].ranks) * layout.shard_numel

    def bytes_sent(self, layout: FlatLayout, micro_batches: int) -> Sent:
        """Bytes that this rank sends in one reduction of a unit."""
        first, shard, itemsize = self.hops[0], layout.shard_numel, self.sent_itemsize(micro_batches)
        others = len(first.ranks) - 1
        match self.algorithm:
            case ReductionAlgorithm.LIBRARY:
                return first.ring(2 * others * first.nbytes(shard))
            case ReductionAlgorithm.LOCAL_SUM:
                return first.exchange(layout.numel * itemsize)
            case ReductionAlgorithm.TWO_STEP:
                return first.exchange(shard * itemsize) + first.ring(others * first.nbytes(shard))
            case ReductionAlgorithm.ONE_HOP:
                return first.exchange(shard * itemsize)
            case ReductionAlgorithm.TWO_HOPS:
                second = self.hops[1]
                inside = first.exchange(len(second.ranks) * shard * itemsize)
                return inside + second.exchange(second.nbytes(shard))
            case ReductionAlgorithm.QUANTIZED_ONE_HOP:
                return first.exchange(first.nbytes(shard))
            case ReductionAlgorithm.QUANTIZED_TWO_HOPS:
                second, total = self.hops[1], Sent()
                for chunk in map(len, self.chunks(shard)):
                    inside = first.exchange(first.nbytes(len(second.ranks) * chunk))
                    total += inside + second.exchange(second.nbytes(chunk))
                return total

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
                return ReductionBuffers(joined=exchanged, received=whole if several else nothing)
            case ReductionAlgorithm.TWO_HOPS:
                second = self.hops[1]
                sums = second.buffer(shard, len(second.ranks))
                rounded = sums.dtype != torch.float32
                return ReductionBuffers(
                    joined=whole,
                    received=Buffer(ranks * shard, self.gradient_dtype),
                    exact=Buffer(shard if rounded else 0, torch.float32),
                    node_sums=sums,
                    received_sums=sums,
                )
            case ReductionAlgorithm.QUANTIZED_ONE_HOP:
                messages = first.buffer(shard, ranks)
                joined = Buffer(numel, self.compute_dtype)
                return ReductionBuffers(joined=joined, to_send=messages, received=messages)
            case ReductionAlgorithm.QUANTIZED_TWO_HOPS:
                second, chunk = self.hops[1], self._chunk_numel(shard)
                messages = first.buffer(len(second.ranks) * chunk, ranks)
                sums = second.buffer(chunk, len(second.ranks))
                return ReductionBuffers(
                    joined=Buffer(numel, self.compute_dtype),
                    to_send=messages,
                    received=messages,
                    node_sums=sums,
                    received_sums=sums,
                )

    def _chunk_numel(self, shard_numel: int) -> int:
        """Elements of a chunk.

        Hops overlap by chunk: several, so that both links are busy most of the time, but of so many elements
        that a message is worth its latency.
        """
        if self.algorithm is not ReductionAlgorithm.QUANTIZED_TWO_HOPS:
            return shard_numel
        block = self.quant_format.block
        wanted = max(-(-shard_numel // CHUNKS), SMALLEST_CHUNK)
        return min(-(-wanted // block) * block, shard_numel)


def choose_algorithm(
    stage: int, grid: Topology, gradient_dtype: torch.dtype, sum_dtype: torch.dtype, *, quantized: bool
) -> ReductionAlgorithm:
    """How gradients are summed over all ranks.

    Stage 0 on one node of several ranks takes an algorithm that copy engines can run. With two ranks that is
    LOCAL_SUM: it sends two thirds of TWO_STEP's bytes in 16 bits, as many in fp32, and copies no sums from a
    gather's buffer. With more ranks it would send more.

    With one hop, each rank of a node sends a gradient for every element that another node owns; with two
    hops, the node sends one sum. Where both send as many bytes, one hop has fewer steps and sums in the order
    of the ranks.
    """
    local = grid.local_world_size
    several = grid.nodes > 1 and local > 1
    if quantized:
        return ReductionAlgorithm.QUANTIZED_TWO_HOPS if several else ReductionAlgorithm.QUANTIZED_ONE_HOP
    if stage == 0:
        if grid.nodes > 1 or local == 1:
            return ReductionAlgorithm.LIBRARY
        return ReductionAlgorithm.LOCAL_SUM if local == 2 else ReductionAlgorithm.TWO_STEP
    if several and sum_dtype.itemsize < local * gradient_dtype.itemsize:
        return ReductionAlgorithm.TWO_HOPS
    return ReductionAlgorithm.ONE_HOP


def may_write_peers(grid: Topology, algorithm: ReductionAlgorithm) -> bool:
    """Whether gradients could be written into the memory of all ranks that need them: those of one node."""
    exchanges = (ReductionAlgorithm.LOCAL_SUM, ReductionAlgorithm.TWO_STEP, ReductionAlgorithm.ONE_HOP)
    return grid.nodes == 1 < grid.world_size and algorithm in exchanges
