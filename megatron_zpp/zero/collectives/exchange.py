"""An exchange of gradients as they are, and the sum of what arrives."""

from collections.abc import Sequence

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.ops.checks import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.collectives.sums import sum_parts
from megatron_zpp.zero.grad_segments import GradSegment, join, segments_inside
from megatron_zpp.zero.reduction_plan import ReductionPlan


def build_exchange(
    plan: ReductionPlan,
    comm_stream: CommStream,
    operations: Operations | None,
    joined: Tensor,
    *,
    whole: bool = False,
) -> "_OneRank | _PeerWrites | _Buffered":
    """The exchange of the plan's first hop. `joined` is the plan's buffer of that name.

    It brings together what all ranks have of some elements, and sums it in the order of the ranks; with
    `whole` every rank sums all elements, not its shard. The volume is that of a reduce-scatter, but 16-bit
    numbers stay 16 bits on the wire without a rounding in the sum, whose bits are those of one process that
    accumulates the ranks' batches in turn.
    """
    if len(comm_stream.ranks) == 1:
        return _OneRank(operations)
    if plan.peer_writes:
        return _PeerWrites(plan, comm_stream, operations, whole)
    return _Buffered(plan, comm_stream, operations, joined, whole)


class _OneRank:
    """Sums from where gradients are; nothing is sent."""

    def __init__(self, operations: Operations | None) -> None:
        self._operations = operations

    def sum(self, sent: Sequence[GradSegment], target: Target) -> None:
        """Exchange and sum, on the communication stream; see Reduction.reduce."""
        for segment in sent:
            sum_parts(
                self._operations,
                segment.flat.view(1, -1),
                segment.of(target.total),
                add=target.add,
                own=segment.flat,
                squares=_blocks_of(segment, target.squares),
            )


class _Buffered:
    """Sends from one buffer and receives in another one."""

    def __init__(
        self,
        plan: ReductionPlan,
        comm_stream: CommStream,
        operations: Operations | None,
        joined: Tensor,
        whole: bool,
    ) -> None:
        self._comm_stream, self._operations, self._joined = comm_stream, operations, joined
        self._collective = comm_stream.all_gather if whole else comm_stream.all_to_all
        self._received = comm_stream.zeros(*plan.buffers.received)

    def sum(self, sent: Sequence[GradSegment], target: Target) -> None:
        """Exchange and sum, on the communication stream; see Reduction.reduce."""
        ranks = len(self._comm_stream.ranks)
        full = join(sent, self._joined.view(sent[0].flat.dtype))
        total, add, squares, _ = target
        received = self._received.view(full.dtype)[: ranks * len(total)]
        self._collective(received, full)
        sum_parts(self._operations, received.view(ranks, -1), total, add=add, squares=squares)


class _PeerWrites:
    """Ranks of one node write into each other's memory, by the copy engines.

    Each rank writes what another one sums from where it lies, and sums its own part from there, so that
    nothing is copied inside a GPU.
    """

    def __init__(
        self, plan: ReductionPlan, comm_stream: CommStream, operations: Operations | None, whole: bool
    ) -> None:
        self._comm_stream, self._operations, self._whole = comm_stream, operations, whole
        self._received = comm_stream.peer_buffers(
            plan.buffers.received.nbytes
        )  # of all ranks, in their order

    def sum(self, sent: Sequence[GradSegment], target: Target) -> None:
        """Exchange and sum, on the communication stream; see Reduction.reduce."""
        group_rank = self._comm_stream.group_rank
        numel = len(target.total)
        received = self._write(sent, numel)
        for segment in segments_inside(sent, self._summed_by(group_rank, numel)):
            sum_parts(
                self._operations,
                received[:, segment.start : segment.start + len(segment.flat)],
                segment.of(target.total),
                add=target.add,
                own=segment.flat,
                group_rank=group_rank,
                squares=_blocks_of(segment, target.squares),
            )

    def _write(self, sent: Sequence[GradSegment], numel: int) -> Tensor:
        """Write to the other ranks; return what they wrote here: (ranks, numel), without this one's row."""
        ranks, group_rank, dtype = len(self._received), self._comm_stream.group_rank, sent[0].flat.dtype
        rows = [buffer.view(dtype)[: ranks * numel].view(ranks, numel) for buffer in self._received]
        self._comm_stream.barrier()  # all have summed what was there
        for distance in range(1, ranks):  # each rank begins with another peer
            peer = (group_rank + distance) % ranks
            for segment in segments_inside(sent, self._summed_by(peer, numel)):
                segment.of(rows[peer][group_rank]).copy_(segment.flat)
            self._comm_stream.record_write(peer, numel * dtype.itemsize)
        self._comm_stream.barrier()
        return rows[group_rank]

    def _summed_by(self, group_rank: int, numel: int) -> range:
        """The `numel` elements of a gradient that a rank of the group sums."""
        start = 0 if self._whole else group_rank * numel
        return range(start, start + numel)


def _blocks_of(segment: GradSegment, squares: Tensor | None) -> Tensor | None:
    """The sums of squares of a segment's blocks."""
    if squares is None:
        return None
    first = segment.start // SQUARES_BLOCK
    return squares[first : first + len(segment.flat) // SQUARES_BLOCK]
