"""Hop 1 of a reduction: the sum of a gradient over the ranks of one node, or of one group of them."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, all_of
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.codecs import build_codec
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.collectives.rotation import Rotation
from megatron_zpp.zero.collectives.sums import sum_parts
from megatron_zpp.zero.grad_segments import GradSegment, join
from megatron_zpp.zero.reduction_plan import ReductionPlan


class PlainFirstHop:
    """Gradients as they are: an all-to-all, and a sum of what the ranks have for this one, in their order.

    Shards of a unit lie in the order (rank of the node, node), so what a rank of the node sums for its
    cross-node ranks is contiguous. Where a node has several groups, a rank sums its part of each `groups`th
    of the unit, and the results lie one after the other.
    """

    def __init__(self, plan: ReductionPlan, comm_stream: CommStream, operations: Operations | None) -> None:
        self._comm_stream, self._operations, self._groups = comm_stream, operations, plan.groups
        self._joined = comm_stream.zeros(*plan.buffers.joined)
        self._received = comm_stream.zeros(*plan.buffers.received)

    def sum(self, sent: Sequence[GradSegment], target: Tensor, *, add: bool) -> Pending:
        """Submit the sum of `sent` into the fp32 `target` (groups · nodes · shard_numel,), or add it."""
        return self._comm_stream.submit(lambda: self.sum_now(sent, target, add=add))

    def sum_now(self, sent: Sequence[GradSegment], target: Tensor, *, add: bool) -> None:
        """The same, in work that runs on the communication stream."""
        full = join(sent, self._joined.view(sent[0].flat.dtype))
        for row, part in zip(full.view(self._groups, -1), target.view(self._groups, -1), strict=True):
            received = self._received.view(row.dtype)[: len(row)]
            self._comm_stream.all_to_all(received, row)
            sum_parts(self._operations, received.view(-1, len(part)), part, add=add)


class QuantizedFirstHop:
    """Gradients as block-quantised messages, chunk by chunk (plan.chunks)."""

    def __init__(self, plan: ReductionPlan, comm_stream: CommStream, operations: Operations) -> None:
        self.codec, self._plan = build_codec(plan.hops[0].code_format, operations), plan
        self._comm_stream, buffers = comm_stream, plan.buffers
        self._joined = comm_stream.zeros(*buffers.joined)
        self._sent = comm_stream.zeros(*buffers.to_send)
        self._received = comm_stream.zeros(*buffers.received)

    def sum(
        self, sent: Sequence[GradSegment], target: Tensor, *, add: bool, rotation: Rotation | None = None
    ) -> Pending:
        """See PlainFirstHop. `target` is laid out by chunks; with a `rotation` there is one."""
        groups, nodes = self._plan.groups, self._plan.nodes
        shard_numel = len(target) // (groups * nodes)
        full, pending = self.joined(sent, len(target) * len(self._comm_stream.ranks))

        def sum_chunk(slices: Tensor, part: Tensor) -> None:
            rows = zip(slices.split(len(slices) // groups), part.view(groups, -1), strict=True)
            for of_group, summed in rows:
                received = self.exchange(of_group, len(summed), rotation)
                own = self._comm_stream.group_rank * len(summed)
                self.codec.sum_into(received, summed, rotation, own, add=add)

        for chunk in self._plan.chunks(shard_numel):
            slices = full.view(-1, shard_numel)[:, chunk.start : chunk.stop]
            part = target[groups * nodes * chunk.start : groups * nodes * chunk.stop]
            pending.append(self._comm_stream.submit(partial(sum_chunk, slices, part)))
        return all_of(pending)

    def joined(self, sent: Sequence[GradSegment], numel: int) -> tuple[Tensor, list[Pending]]:
        """The whole gradient (numel,), and the work that puts it together, if it has several segments."""
        if len(sent) == 1:
            return sent[0].flat, []
        full = self._joined.view(sent[0].flat.dtype)[:numel]
        return full, [self._comm_stream.submit(partial(join, sent, full))]

    def exchange(self, slices: Tensor, numel: int, rotation: Rotation | None = None) -> Tensor:
        """A message from each rank: (ranks, message_bytes(numel)).

        `slices` has a row for each owner; the rows of a message lie one after the other.
        """
        ranks, nbytes = len(self._comm_stream.ranks), self.codec.format.message_bytes(numel)
        sent, received = (buffer[: ranks * nbytes] for buffer in (self._sent, self._received))
        self.codec.encode(slices, sent.view(ranks, nbytes), rotation, 0)
        self._comm_stream.all_to_all(received, sent)
        return received.view(ranks, nbytes)


class Fold:
    """Adds the sums of the groups of a node, in fp32: an all-to-all between them, once per step."""

    def __init__(self, plan: ReductionPlan, comm_stream: CommStream, operations: Operations | None) -> None:
        """`comm_stream` has the rank of this one's place in each group of the node."""
        self._comm_stream, self._operations, self._groups = comm_stream, operations, plan.groups
        self._received = comm_stream.zeros(*plan.buffers.folded)

    def sum_now(self, accumulated: Tensor, target: Target) -> None:
        """Sum `accumulated` (groups · n,) of each group into the target (n,), on the present stream."""
        total, _, squares, _ = target
        received = self._received[: len(accumulated)]
        self._comm_stream.all_to_all(received, accumulated)
        sum_parts(self._operations, received.view(self._groups, -1), total, add=False, squares=squares)
