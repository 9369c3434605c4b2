"""The sum of gradients as they are in one exchange: from where they lie, wherever that is possible."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.exchange.segments import GradSegment, join, segments_inside
from megatron_zpp.exchange.sums import sum_parts
from megatron_zpp.ops.formats import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations


def build_exchange(
    comm_stream: CommStream, operations: Operations | None, numel: int, dtype: torch.dtype
) -> "Exchange":
    """The exchange among the ranks of a stream of at most `numel` elements, in `dtype` or fewer bytes.

    It brings together what all ranks have of some elements, and sums it in the order of the ranks. The volume
    is that of a reduce-scatter, but 16-bit numbers stay 16 bits on the wire without a rounding in the sum,
    whose bits are those of one process that accumulates the ranks' batches in turn.
    """
    if len(comm_stream.ranks) == 1 or comm_stream.writes_peers:
        return _InPlace(comm_stream, operations, numel * dtype.itemsize)
    return _Buffered(comm_stream, operations, numel, dtype)


class _Buffered:
    """Sends from one buffer and receives in another one."""

    def __init__(
        self, comm_stream: CommStream, operations: Operations | None, numel: int, dtype: torch.dtype
    ) -> None:
        self._comm_stream, self._operations = comm_stream, operations
        self._joined, self._received = (comm_stream.zeros(numel, dtype) for _ in range(2))

    def sum(self, sent: Sequence[GradSegment], total: Tensor, *, add: bool, squares: Tensor | None) -> None:
        """Exchange and sum, on the communication stream; see Reduction.reduce."""
        ranks = len(self._comm_stream.ranks)
        full = join(sent, self._joined.view(sent[0].flat.dtype))
        received = self._received.view(full.dtype)[: ranks * len(total)]
        self._comm_stream.all_to_all(received, full)
        sum_parts(self._operations, received.view(ranks, -1), total, add=add, squares=squares)


class _InPlace:
    """Sums from where gradients are; ranks of one node write into each other's memory, by the copy engines.

    Each rank writes what another one sums from where it lies, and sums its own part from there, so that
    nothing is copied inside a GPU.
    """

    def __init__(self, comm_stream: CommStream, operations: Operations | None, nbytes: int) -> None:
        self._comm_stream, self._operations = comm_stream, operations
        alone = len(comm_stream.ranks) == 1
        self._received = [] if alone else comm_stream.peer_buffers(nbytes)  # of all ranks, in their order

    def sum(self, sent: Sequence[GradSegment], total: Tensor, *, add: bool, squares: Tensor | None) -> None:
        """See _Buffered."""
        group_rank = self._comm_stream.group_rank
        received = self._write(sent, len(total)) if self._received else None
        for segment in segments_inside(sent, _part(group_rank, len(total))):
            own = segment.flat
            sum_parts(
                self._operations,
                own[None] if received is None else received[:, segment.start : segment.start + len(own)],
                segment.of(total),
                add=add,
                own=own,
                group_rank=group_rank,
                squares=_blocks_of(segment, squares),
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


def _blocks_of(segment: GradSegment, squares: Tensor | None) -> Tensor | None:
    """The sums of squares of a segment's blocks."""
    if squares is None:
        return None
    first = segment.start // SQUARES_BLOCK
    return squares[first : first + len(segment.flat) // SQUARES_BLOCK]


Exchange: TypeAlias = _InPlace | _Buffered
