"""Gathers of weights and reductions of gradients as they are; quantised ones have the same faces."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, copy
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.checks import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.grad_segments import GradSegment, join, segments_inside
from megatron_zpp.zero.theory import AllReduceAlgorithm


class Gather(Protocol):
    """How a rank publishes its shard of a unit, and how all shards become the whole unit."""

    def gather_source(self, shard_numel: int) -> Tensor:
        """A new buffer to publish a shard in."""

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """Writes master weights (n,) fp32 as they are sent."""

    def gather(self, full: Tensor, gather_source: Tensor, keep: Tensor | None = None) -> Pending:
        """Fills `full` (ranks · n,) from every rank's `gather_source`: the same bits on every rank.

        `keep`, a secondary shard, gets this rank's part of what was filled.
        """


class Reduction(Protocol):
    """How gradients are summed over ranks. They stay where they are until the sum is waited for.

    Beside this stage 0, which shards nothing, calls PlainReduction's `all_reduce`, and error feedback asks
    QuantizedReduction for its `error_numel` and `block`.
    """

    returns_squared_norms: bool  # whether `squares` come without a pass of their own; else None is given

    def reduce_scatter(
        self,
        sent: Sequence[GradSegment],
        shard: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """Sums `sent`, together (ranks · n,), over ranks into the fp32 `shard` (n,): over it, or added.

        `squares` (n / SQUARES_BLOCK,) get what `sum_squares` finds in the shard then. `error` is what earlier
        sums of this unit lost, where the reduction feeds it back.
        """


class PlainGather:
    """Sends shards in the compute format `dtype`."""

    def __init__(self, comm_stream: CommStream, dtype: torch.dtype, group_rank: int) -> None:
        """`group_rank` says which part is this rank's to keep."""
        self._comm_stream, self._dtype, self._group_rank = comm_stream, dtype, group_rank

    def gather_source(self, shard_numel: int) -> Tensor:
        """See Gather."""
        return self._comm_stream.zeros(shard_numel, self._dtype)

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather. Where both are the same memory there is nothing to write."""
        copy(gather_source, master)

    def gather(self, full: Tensor, gather_source: Tensor, keep: Tensor | None = None) -> Pending:
        """See Gather. `gather_source` may be this rank's own part of `full`."""

        def work() -> None:
            self._comm_stream.all_gather(full, gather_source)
            if keep is not None:
                keep.copy_(full.view(-1, len(keep))[self._group_rank])

        return self._comm_stream.submit(work)


class PlainReduction:
    """Sums gradients in fp32, in the order of the ranks. They are sent in `dtype` or a smaller format.

    An all-to-all and then a sum: the volume of a reduce-scatter, but 16-bit numbers stay 16 bits on the wire
    without a rounding in the sum, whose bits are those of one process that accumulates the ranks' batches in
    turn. Of that volume ranks that share a node send each its own to other nodes: TwoHopReduction is for
    them. `operations` are the kernels for the sum; None: torch's, a pass over memory for each rank.

    Where ranks can write each other's memory, each writes what is for another from where it lies, and sums
    what is its own from there: nothing is copied inside a GPU. Else it goes through a buffer of the stream's.
    """

    def __init__(
        self,
        comm_stream: CommStream,
        dtype: torch.dtype,
        largest: int,
        operations: Operations | None = None,
        *,
        all_reduce_algorithm: AllReduceAlgorithm | None = None,
    ) -> None:
        """`largest` is the size of the largest unit; without `all_reduce_algorithm` there are only shards."""
        self._comm_stream, self._operations, self._algorithm = comm_stream, operations, all_reduce_algorithm
        self.returns_squared_norms = all_reduce_algorithm in (None, AllReduceAlgorithm.LOCAL_SUM)
        several, library = len(comm_stream.ranks) > 1, all_reduce_algorithm is AllReduceAlgorithm.LIBRARY
        received = largest * (
            len(comm_stream.ranks) if all_reduce_algorithm is AllReduceAlgorithm.LOCAL_SUM else 1
        )
        # Where each rank, in their order, receives, if this one can write there; else it is sent to them.
        self._peer_buffers = None if library else comm_stream.peer_buffers(received * dtype.itemsize)
        exchanges = several and self._peer_buffers is None and not library
        rounds = library and dtype != torch.float32  # else it sums where `total` is
        whole = exchanges or (several and (rounds or all_reduce_algorithm is AllReduceAlgorithm.TWO_STEP))
        self._whole = comm_stream.zeros(largest if whole else 0, dtype)  # gradients to send, sums to gather
        self._received = comm_stream.zeros(received if exchanges else 0, dtype)

    def reduce_scatter(
        self,
        sent: Sequence[GradSegment],
        shard: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction. Nothing is lost here."""
        return self._comm_stream.submit(lambda: self._exchange_and_sum(sent, shard, add, squares))

    def all_reduce(self, sent: Sequence[GradSegment], total: Tensor, squares: Tensor | None) -> Pending:
        """Sums `sent`, which may be `total`, over ranks into the fp32 `total`, both (ranks · n,).

        In the library's way they are summed in `dtype`. The two steps are a reduce-scatter and a gather of
        sums that are rounded to `dtype` once, which copy engines can do. Everywhere means that each rank
        receives all gradients and sums them itself, and finds the `squares`, as a reduce-scatter does.
        """

        def work() -> None:
            if self._algorithm is AllReduceAlgorithm.LOCAL_SUM:
                self._exchange_and_sum(sent, total, add=False, squares=squares)
                return
            full = self._whole[: len(total)] if len(self._whole) else total
            if self._algorithm is AllReduceAlgorithm.TWO_STEP:
                mine, own = (
                    t.view(len(self._comm_stream.ranks), -1)[self._comm_stream.group_rank]
                    for t in (total, full)
                )
                exact = own if own.dtype == torch.float32 else mine
                self._exchange_and_sum(sent, exact, add=False, squares=None)
                copy(own, exact)
                self._comm_stream.all_gather(full, own)
            else:
                self._comm_stream.all_reduce(join(sent, full))
            copy(total, full)

        return self._comm_stream.submit(work)

    def _exchange_and_sum(
        self, sent: Sequence[GradSegment], shard: Tensor, add: bool, squares: Tensor | None
    ) -> None:
        ranks, group_rank = len(self._comm_stream.ranks), self._comm_stream.group_rank
        if self._peer_buffers is None and ranks > 1:
            full = join(sent, self._whole.view(sent[0].flat.dtype))
            received = self._received.view(full.dtype)[: ranks * len(shard)]
            if self._algorithm is AllReduceAlgorithm.LOCAL_SUM:
                self._comm_stream.all_gather(received, full)
            else:
                self._comm_stream.all_to_all(received, full)
            _sum_parts(self._operations, received.view(ranks, -1), shard, add=add, squares=squares)
            return
        others = None if self._peer_buffers is None else self._write(self._peer_buffers, sent, len(shard))
        for part in segments_inside(sent, self._summed_by(group_rank, len(shard))):
            columns = slice(part.start, part.start + len(part.flat))
            blocks = slice(columns.start // SQUARES_BLOCK, columns.stop // SQUARES_BLOCK)
            _sum_parts(
                self._operations,
                part.flat.view(1, -1) if others is None else others[:, columns],
                shard[columns],
                add=add,
                own=part.flat,
                group_rank=group_rank,
                squares=None if squares is None else squares[blocks],
            )

    def _write(self, peer_buffers: Sequence[Tensor], sent: Sequence[GradSegment], numel: int) -> Tensor:
        """Writes to the other ranks; returns what they wrote here: (ranks, numel), no row of this one."""
        ranks, group_rank, dtype = len(peer_buffers), self._comm_stream.group_rank, sent[0].flat.dtype
        rows = [room.view(dtype)[: ranks * numel].view(ranks, numel) for room in peer_buffers]
        self._comm_stream.barrier()  # all have summed what was there
        for distance in range(1, ranks):  # each of them begins with another
            peer = (group_rank + distance) % ranks
            for part in segments_inside(sent, self._summed_by(peer, numel)):
                part.of(rows[peer][group_rank]).copy_(part.flat)
            self._comm_stream.record_write(peer, numel * dtype.itemsize)
        self._comm_stream.barrier()
        return rows[group_rank]

    def _summed_by(self, group_rank: int, numel: int) -> range:
        """The `numel` elements of a gradient that the rank of this place sums."""
        start = 0 if self._algorithm is AllReduceAlgorithm.LOCAL_SUM else group_rank * numel
        return range(start, start + numel)


class TwoHopReduction:
    """Sums gradients inside each node first, so that each link between nodes has them once.

    Hop 1: the rank of place p gets, from each rank of its node, what that has for the ranks of place p on
    all nodes, and sums it in the order of the places. The gradient is in the order of the ranks, so what goes
    to one node is in one piece: an all-to-all for each node. Hop 2: the sums travel to their owners, which
    add those of the nodes in their order. Sums are fp32.
    """

    def __init__(
        self,
        inside: CommStream,
        between: CommStream,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
        largest_shard: int,
        operations: Operations | None = None,
    ) -> None:
        """`inside` has the ranks of the node, `between` those of this rank's place on every node.

        Gradients are sent in the format `dtype` or a smaller one, and a node's sums in `sum_dtype`: fp32
        loses nothing.
        """
        self._inside, self._operations = inside, operations
        self._local, self._nodes = len(inside.ranks), len(between.ranks)
        self._whole = inside.zeros(self._nodes * self._local * largest_shard, dtype)
        self._received = inside.zeros(self._local * largest_shard, dtype)
        rounded = sum_dtype != torch.float32
        self._sum = inside.zeros(largest_shard, torch.float32) if rounded else None  # before it is rounded
        self._hops = TwoHops(inside, between, self._nodes * largest_shard, sum_dtype)

    returns_squared_norms = True

    def reduce_scatter(
        self,
        sent: Sequence[GradSegment],
        shard: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction. What rounded sums lose is lost."""

        def fill(sums: Tensor) -> None:
            full = join(sent, self._whole.view(sent[0].flat.dtype))
            for row, node_sum in zip(full.view(self._nodes, -1), sums.view(self._nodes, -1), strict=True):
                received = self._received.view(row.dtype)[: len(row)]
                self._inside.all_to_all(received, row)
                exact = node_sum if self._sum is None else self._sum[: len(shard)]
                _sum_parts(self._operations, received.view(self._local, -1), exact, add=False)
                copy(node_sum, exact)

        def take(received: Tensor) -> None:
            _sum_parts(self._operations, received.view(self._nodes, -1), shard, add=add, squares=squares)

        return self._hops.submit(self._nodes * len(shard), fill, take)


def _sum_parts(
    operations: Operations | None,
    parts: Tensor,
    total: Tensor,
    *,
    add: bool,
    own: Tensor | None = None,
    group_rank: int = 0,
    squares: Tensor | None = None,
) -> None:
    """Sums `parts` (P, n) in order into the fp32 `total` (n,): over it, or added; `own` instead of one."""
    if operations is not None:
        operations.sum_parts(parts, total, add=add, own=own, group_rank=group_rank, squares=squares)
        return
    if own is not None and own.data_ptr() == total.data_ptr():
        own = own.clone()
    for index, row in enumerate(parts):
        part = own if own is not None and index == group_rank else row
        total.add_(part) if add or index else total.copy_(part)
    if squares is not None:
        sum_squares(None, total, squares)


def sum_squares(operations: Operations | None, flat: Tensor, sums: Tensor) -> None:
    """`sums` (n / SQUARES_BLOCK,) fp32 get those of the squares of each block of `flat` (n,)."""
    if operations is not None:
        operations.sum_squares(flat, sums)
        return
    norms = torch.linalg.vector_norm(flat.view(-1, SQUARES_BLOCK), dim=1, dtype=torch.float32)
    torch.square(norms, out=sums)


def sum_over_ranks(value: Tensor, topology: Topology) -> Tensor:
    """The sum of one small tensor over all ranks; a NaN on one rank is a NaN on all."""
    if topology.world_size > 1:
        value = value.clone()
        dist.all_reduce(value)  # SUM: gloo's MAX and MIN would lose a NaN
    return value
