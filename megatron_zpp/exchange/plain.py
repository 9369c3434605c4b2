"""Sums gradients from where they lie: those of one rank, or of ranks that write into each other's memory."""

from collections.abc import Sequence

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.exchange.segments import GradSegment, segments_inside
from megatron_zpp.ops.formats import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations


class InPlace:
    """Sums from where gradients are; ranks of one node write into each other's memory, by the copy engines.

    Each rank writes what another one sums from where it lies, and sums its own part from there, so that
    nothing is copied inside a GPU.
    """

    def __init__(self, comm_stream: CommStream, operations: Operations, nbytes: int) -> None:
        """`nbytes`: of the largest gradient."""
        self._comm_stream, self._operations = comm_stream, operations
        alone = len(comm_stream.ranks) == 1
        self._received = [] if alone else comm_stream.peer_buffers(nbytes)  # of all ranks, in their order

    def sum(self, sent: Sequence[GradSegment], total: Tensor, *, add: bool, squares: Tensor | None) -> None:
        """Exchange and sum, on the communication stream; see Reduction.reduce."""
        group_rank = self._comm_stream.group_rank
        received = self._write(sent, len(total)) if self._received else None
        for segment in segments_inside(sent, _part(group_rank, len(total))):
            own, first = segment.flat, segment.start // SQUARES_BLOCK
            self._operations.sum_parts(
                own[None] if received is None else received[:, segment.start : segment.start + len(own)],
                segment.of(total),
                add=add,
                own=own,
                group_rank=group_rank,
                squares=None if squares is None else squares[first : first + len(own) // SQUARES_BLOCK],
            )

    def _write(self, sent: Sequence[GradSegment], numel: int) -> Tensor:
        """Write to the other ranks; return what they wrote here: (ranks, numel), without this one's row."""
        ranks, group_rank, dtype = len(self._received), self._comm_stream.group_rank, sent[0].flat.dtype
        rows = [buffer.view(dtype)[: ranks * numel].view(ranks, numel) for buffer in self._received]
        self._comm_stream.barrier()  # all have summed what was there
        for distance in range(1, ranks):  # each rank begins with another peer
            peer = (group_rank + distance) % ranks
            for segment in segments_inside(sent, _part(peer, numel)):
                segment.of(rows[peer][group_rank]).copy_(segment.flat)
            self._comm_stream.record_write(peer, numel * dtype.itemsize)
        self._comm_stream.barrier()
        return rows[group_rank]


def _part(group_rank: int, numel: int) -> range:
    """The `numel` elements of a gradient that a rank of the group sums."""
    return range(group_rank * numel, (group_rank + 1) * numel)
