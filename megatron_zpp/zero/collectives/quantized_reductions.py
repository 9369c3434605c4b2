"""qgZ: reductions of gradients that travel as block-quantised messages (ZeRO++, 2306.10209, section 3.3)."""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, all_of
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.codecs import BlockCodec, build_codec
from megatron_zpp.zero.collectives.first_hop import Fold, QuantizedFirstHop
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.collectives.rotation import Rotation
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.reduction_plan import ReductionPlan


class QuantizedOneHopReduceScatter:
    """Between ranks of one node, or nodes of one rank: every rank decodes and sums the messages for it."""

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations
    ) -> None:
        (in_turn,) = comm_streams
        self._lanes = deque((stream, QuantizedFirstHop(plan, stream, operations)) for stream in in_turn)

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        assert target.squares is None
        total, rotation = target.total, target.rotation
        comm_stream, hop = self._lanes[0]
        self._lanes.rotate(-1)
        pending = hop.sum(sent, total, add=target.add, rotation=rotation)
        if rotation is None:
            return pending
        return all_of([pending, comm_stream.submit(lambda: rotation.clear_gaps(total))])


class QuantizedTwoHopReduceScatter:
    """Gradients cross each link between nodes once.

    Hop 1, inside the node: a rank gets what its node has for its cross-node ranks, in the order of the nodes.
    It sums, and hop 2, between nodes, takes each slice to its owner. The hops are pipelined by chunk.
    """

    def __init__(
        self, plan: ReductionPlan, comm_streams: Sequence[Sequence[CommStream]], operations: Operations
    ) -> None:
        (inside,), between, *fold = comm_streams
        self._plan, self._operations, self._between = plan, operations, between[0]
        self._ranks, self._nodes = plan.groups * len(inside.ranks) * plan.nodes, plan.nodes
        self._first = QuantizedFirstHop(plan, inside, operations)
        self._second = build_codec(plan.hops[1].code_format, operations)
        self._fold = Fold(plan, fold[0][0], operations) if fold else None
        self._node_sum = inside.zeros(*plan.buffers.exact)
        self._hops = TwoHops(inside, between, plan.buffers)

    def reduce(self, sent: Sequence[GradSegment], target: Target) -> Pending:
        """See Reduction."""
        assert target.squares is None
        assert self._fold is None
        numel = len(target.total)
        full, pending = self._first.joined(sent, numel * self._ranks)
        for chunk in self._plan.chunks(numel):
            slices = full.view(-1, numel)[:, chunk.start : chunk.stop]
            pending.append(self._send(self._sum_of_chunk(slices, len(chunk)), target, chunk))
        return self._cleared(pending, target)

    def accumulate(self, sent: Sequence[GradSegment], accumulated: Tensor, *, add: bool) -> Pending:
        """See GroupReduction."""
        return self._first.sum(sent, accumulated, add=add)

    def reduce_accumulated(self, accumulated: Tensor, target: Target) -> Pending:
        """See GroupReduction. `accumulated` is laid out by chunks."""
        assert target.squares is None
        pending = []
        for chunk in self._plan.chunks(len(target.total)):
            slices = self._plan.groups * self._nodes
            sums = accumulated[slices * chunk.start : slices * chunk.stop]
            pending.append(self._send(self._folded(sums, len(chunk)), target, chunk))
        return self._cleared(pending, target)

    def _sum_of_chunk(self, slices: Tensor, numel: int) -> Callable[[Tensor, Rotation | None, int], None]:
        """Hop 1 of a chunk of so many elements of each shard; it encodes its sum for hop 2."""

        def encode(messages: Tensor, rotation: Rotation | None, first: int) -> None:
            received = self._first.exchange(slices, self._nodes * numel)
            if isinstance(self._second, BlockCodec):
                self._operations.sum_quantize(received, messages, self._second.format)
                return
            node_sum = self._node_sum[: self._nodes * numel]
            self._first.codec.sum_into(received, node_sum, None, 0, add=False)
            self._second.encode(node_sum.view(self._nodes, -1), messages, rotation, first)

        return encode

    def _folded(self, accumulated: Tensor, numel: int) -> Callable[[Tensor, Rotation | None, int], None]:
        """The same of what micro-batches accumulated, after the fold."""

        def encode(messages: Tensor, rotation: Rotation | None, first: int) -> None:
            node_sum = accumulated
            if self._fold is not None:
                node_sum = self._node_sum[: self._nodes * numel]
                self._fold.sum_now(accumulated, Target(node_sum))
            self._second.encode(node_sum.view(self._nodes, -1), messages, rotation, first)

        return encode

    def _send(
        self, encode: Callable[[Tensor, Rotation | None, int], None], target: Target, chunk: range
    ) -> Pending:
        """Hop 2 of a chunk, whose messages `encode` writes."""
        total, add, _, rotation = target
        shard = total[chunk.start : chunk.stop]
        first = self._plan.first_element(len(total), chunk)
        own = first + self._plan.hops[1].group_rank * len(chunk)

        def fill(sums: Tensor) -> None:
            encode(sums.view(self._nodes, -1), rotation, first)

        def take(received: Tensor) -> None:
            self._second.sum_into(received.view(self._nodes, -1), shard, rotation, own, add=add)

        nbytes = self._nodes * self._second.format.message_bytes(len(chunk))
        return self._hops.submit(nbytes, fill, take)

    def _cleared(self, pending: list[Pending], target: Target) -> Pending:
        total, rotation = target.total, target.rotation
        if rotation is None:
            return all_of(pending)
        summed = all_of(pending)

        def clear_gaps() -> None:
            summed.wait()
            rotation.clear_gaps(total)

        return all_of([*pending, self._between.submit(clear_gaps)])
