"""Gathers of weights and reductions of gradients as they are; quantised ones have the same faces."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.ops.checks import SQUARES_BLOCK
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.lane import Lane, Pending, copy
from megatron_zpp.zero.parts import Part, parts_inside
from megatron_zpp.zero.topology import Topology
from megatron_zpp.zero.two_hops import TwoHops


class Gather(Protocol):
    """How a rank publishes its shard of a unit, and how all shards become the whole unit."""

    def published(self, shard_numel: int) -> Tensor:
        """A new buffer to publish a shard in."""

    def publish(self, master: Tensor, published: Tensor) -> None:
        """Writes master weights (n,) fp32 as they are sent."""

    def gather(self, full: Tensor, published: Tensor, keep: Tensor | None = None) -> Pending:
        """Fills `full` (ranks · n,) from every rank's `published`: the same bits on every rank.

        `keep`, a secondary shard, gets this rank's part of what was filled.
        """


class Reduction(Protocol):
    """How gradients are summed over ranks. They are there until the sum is waited for."""

    takes_parts: bool  # whether gradients may be in several parts; else they are one, in a gradient slot
    finds_squares: (
        bool  # whether `squares` come with the sum, without a pass of their own; else None is given
    )

    def reduce_scatter(
        self,
        sent: Sequence[Part],
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

    def __init__(self, lane: Lane, dtype: torch.dtype, place: int) -> None:
        """`place` says which part is this rank's to keep."""
        self._lane, self._dtype, self._place = lane, dtype, place

    def published(self, shard_numel: int) -> Tensor:
        """See Gather."""
        return self._lane.zeros(shard_numel, self._dtype)

    def publish(self, master: Tensor, published: Tensor) -> None:
        """See Gather. Where both are the same memory there is nothing to write."""
        copy(published, master)

    def gather(self, full: Tensor, published: Tensor, keep: Tensor | None = None) -> Pending:
        """See Gather. `published` may be this rank's own part of `full`."""

        def work() -> None:
            self._lane.all_gather(full, published)
            if keep is not None:
                keep.copy_(full.view(-1, len(keep))[self._place])

        return self._lane.submit(work)


class PlainReduction:
    """Sums gradients in fp32, in the order of the ranks. They are sent in `dtype` or a smaller format.

    An all-to-all and then a sum: the volume of a reduce-scatter, but 16-bit numbers stay 16 bits on the wire
    without a rounding in the sum, whose bits are those of one process that accumulates the ranks' batches in
    turn. Of that volume ranks that share a node send each its own to other nodes: TwoHopReduction is for
    them. `operations` are the kernels for the sum; None: torch's, a pass over memory for each rank.

    Where ranks can write each other's memory, each writes what is for another from where it lies, and sums
    what is its own from there: nothing is copied inside a GPU.
    """

    finds_squares = True

    def __init__(
        self,
        lane: Lane,
        dtype: torch.dtype,
        largest: int,
        operations: Operations | None = None,
        rooms: Sequence[Tensor] | None = None,
    ) -> None:
        """`largest` is the size of the largest unit; 0 where `all_reduce` is to be the library's.

        `rooms` (largest · itemsize,) uint8 are the memory in which each rank, in their order, receives,
        all of it written by this one; None: an all-to-all.
        """
        self._lane, self._operations, self._rooms = lane, operations, rooms
        self._scatters = largest > 0 and len(lane.ranks) > 1
        self._received = lane.zeros(largest if self._scatters and rooms is None else 0, dtype)
        self.takes_parts = rooms is not None

    def reduce_scatter(
        self,
        sent: Sequence[Part],
        shard: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction. Nothing is lost here."""
        return self._lane.submit(lambda: self._exchange_and_sum(sent, shard, add, squares))

    def all_reduce(self, sent: Sequence[Part], full: Tensor, total: Tensor) -> Pending:
        """Sums `sent` over ranks into the fp32 `total`, by way of `full`, all (ranks · n,).

        In the library's way `sent` is `full`. The other way is a reduce-scatter and a gather of sums that are
        rounded to the format of `full` once, which copy engines can do; there `sent` can be in a smaller
        format, and without rooms in the memory of `full`.
        """

        def work() -> None:
            if self._scatters:
                mine, own = (t.view(len(self._lane.ranks), -1)[self._lane.place] for t in (total, full))
                exact = own if own.dtype == torch.float32 else mine
                self._exchange_and_sum(sent, exact, add=False, squares=None)
                copy(own, exact)
                self._lane.all_gather(full, own)
            else:
                self._lane.all_reduce(full)
            copy(total, full)

        return self._lane.submit(work)

    def _exchange_and_sum(
        self, sent: Sequence[Part], shard: Tensor, add: bool, squares: Tensor | None
    ) -> None:
        if self._rooms is not None:
            self._write_and_sum(sent, shard, add, squares)
            return
        full = _whole(sent)
        parts = full.view(1, -1)
        if len(self._lane.ranks) > 1:
            received = self._received.view(full.dtype)[: len(full)]
            self._lane.all_to_all(received, full)
            parts = received.view(len(self._lane.ranks), -1)
        _sum_parts(self._operations, parts, shard, add=add, squares=squares)

    def _write_and_sum(self, sent: Sequence[Part], shard: Tensor, add: bool, squares: Tensor | None) -> None:
        """A rank's room has a row for what each rank sends it; nobody writes the row of its own."""
        ranks, place, numel = len(self._lane.ranks), self._lane.place, len(shard)
        dtype = sent[0].flat.dtype
        rooms = [room.view(dtype)[: ranks * numel].view(ranks, numel) for room in self._rooms]
        self._lane.meet()  # all have summed what was there
        for distance in range(1, ranks):  # each of them begins with another
            peer = (place + distance) % ranks
            for part in parts_inside(sent, range(peer * numel, (peer + 1) * numel)):
                part.of(rooms[peer][place]).copy_(part.flat)
            self._lane.wrote(peer, numel * dtype.itemsize)
        self._lane.meet()
        for part in parts_inside(sent, range(place * numel, (place + 1) * numel)):
            columns = slice(part.start, part.start + len(part.flat))
            blocks = slice(columns.start // SQUARES_BLOCK, columns.stop // SQUARES_BLOCK)
            _sum_parts(
                self._operations,
                rooms[place][:, columns],
                shard[columns],
                add=add,
                own=part.flat,
                place=place,
                squares=None if squares is None else squares[blocks],
            )


class TwoHopReduction:
    """Sums gradients inside each node first, so that each link between nodes has them once.

    Hop 1: the rank of place p gets, from each rank of its node, what that has for the ranks of place p on
    all nodes, and sums it in the order of the places. `full` is in the order of the ranks, so what goes to
    one node is in one piece, and is sent from where it lies: an all-to-all for each node. Hop 2: the sums
    travel to their owners, which add those of the nodes in their order. Sums are fp32.
    """

    def __init__(
        self,
        inside: Lane,
        between: Lane,
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
        self._received = inside.zeros(self._local * largest_shard, dtype)
        rounded = sum_dtype != torch.float32
        self._sum = inside.zeros(largest_shard, torch.float32) if rounded else None  # before it is rounded
        self._hops = TwoHops(inside, between, self._nodes * largest_shard, sum_dtype)

    takes_parts = False
    finds_squares = True

    def reduce_scatter(
        self,
        sent: Sequence[Part],
        shard: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction. What rounded sums lose is lost."""
        full = _whole(sent)

        def fill(sums: Tensor) -> None:
            for row, node_sum in zip(full.view(self._nodes, -1), sums.view(self._nodes, -1), strict=True):
                received = self._received.view(row.dtype)[: len(row)]
                self._inside.all_to_all(received, row)
                exact = node_sum if self._sum is None else self._sum[: len(shard)]
                _sum_parts(self._operations, received.view(self._local, -1), exact, add=False)
                copy(node_sum, exact)

        def take(received: Tensor) -> None:
            _sum_parts(self._operations, received.view(self._nodes, -1), shard, add=add, squares=squares)

        return self._hops.submit(self._nodes * len(shard), fill, take)


def _whole(sent: Sequence[Part]) -> Tensor:
    """The gradient that is in one part."""
    ((_, full),) = sent
    return full


def _sum_parts(
    operations: Operations | None,
    parts: Tensor,
    total: Tensor,
    *,
    add: bool,
    own: Tensor | None = None,
    place: int = 0,
    squares: Tensor | None = None,
) -> None:
    """Sums `parts` (P, n) in order into the fp32 `total` (n,): over it, or added; `own` instead of one."""
    if operations is not None:
        operations.sum_parts(parts, total, add=add, own=own, place=place, squares=squares)
        return
    for index, row in enumerate(parts):
        part = own if own is not None and index == place else row
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
