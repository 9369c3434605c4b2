"""Whole matrices from the shards of a node's ranks, and back.

Muon looks at whole matrices. Each is the work of one rank of the node, by `balanced`, in rounds of units that
follow each other: an exchange brings the parts of a round's matrices to these ranks, and another brings back
what has become of them. Ranks that have the same states (stage 0, and what tensor ranks have whole) send
nothing on the way there: the rank that works has them too.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import ALIGNMENT, Box, Layout, Placement, overlap, within
from megatron_zpp.zero.newton_schulz import flops

_IMBALANCE = 1.05  # of the work of a round, at most, while there are more units to add
_LEAST = 2**26  # elements of a round for each rank, while there are more


@dataclass(frozen=True)
class Matrix:
    """Some rows of a parameter of a unit, all its columns."""

    unit: int
    placement: Placement
    rows: range  # of the whole parameter

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.rows), self.placement.shape[1]

    @property
    def cost(self) -> int:
        """What a step of Newton-Schulz computes."""
        return flops(*self.shape, steps=1)


class Part(NamedTuple):
    """A part of a matrix that a rank has: consecutive elements of its shard of the unit."""

    elements: range  # of the unit's buffer
    box: Box  # in the matrix


class Held(NamedTuple):
    """How the states of a unit are cut."""

    layout: Layout
    axes: tuple[Axis, ...]

    def elements(self, mesh: Mesh) -> range:
        """What the rank of `mesh` has from the unit's first matrix to its last one."""
        (owned,) = self.layout.ranges(mesh, self.axes)
        return overlap(owned, self.layout.hull(of_matrices=True))

    def parts(self, matrix: Matrix, mesh: Mesh) -> Iterator[Part]:
        """What the rank of `mesh` has of a matrix, in the order of its shard."""
        for piece in self.layout.pieces(mesh, self.axes):
            if piece.placement is not matrix.placement:
                continue
            for block in piece.blocks(mesh.rank):
                for here, there in block.parts:
                    rows = overlap(range(there[0].start, there[0].stop), matrix.rows)
                    first = here[0].start + rows.start - there[0].start
                    start = piece.at.start + block.elements.start - piece.elements.start
                    start += first * block.shape[1]
                    if rows:
                        elements = range(start, start + len(rows) * block.shape[1])
                        inside = slice(rows.start - matrix.rows.start, rows.stop - matrix.rows.start)
                        yield Part(elements, (inside, there[1]))

    def senders(self, matrix: Matrix, mesh: Mesh, owner: int) -> list[int]:
        """The ranks of a node that bring a matrix together at `owner`: one of those with equal parts."""
        split = () if matrix.placement.split is None else (matrix.placement.split.axis,)
        alike = [axis for axis in mesh.inside_node if axis not in (*self.axes, *split)]
        ranks = mesh.ranks(*mesh.inside_node)
        return [rank for rank in ranks if all(axis.index(rank) == axis.index(owner) for axis in alike)]


def matrices_of(unit: int, layout: Layout) -> list[Matrix]:
    """The matrices of a unit."""
    found = []
    for placement in layout.placements:
        start = 0
        for rows in placement.matrices:
            found.append(Matrix(unit, placement, range(start, start + rows)))
            start += rows
    return found


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """The place of each of so many costs: the largest first, each where there is the least so far."""
    places, load = [0] * len(costs), [0] * ranks
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        places[at] = min(range(ranks), key=load.__getitem__)
        load[places[at]] += costs[at]
    return places


def imbalance(costs: Sequence[int], places: Sequence[int], ranks: int) -> float:
    """The largest load over the mean."""
    load = [0] * ranks
    for cost, place in zip(costs, places, strict=True):
        load[place] += cost
    return max(load) * ranks / max(1, sum(load))


def rounds(units: Sequence[Sequence[Matrix]], ranks: int, least: int = _LEAST) -> list[list[Matrix]]:
    """Matrices that are worked on at the same time: of as few units in a row as balance the ranks."""
    found: list[list[Matrix]] = []
    newest: list[Matrix] = []
    for matrices in units:
        newest = newest + list(matrices)
        costs, numel = [each.cost for each in newest], sum(each.shape[0] * each.shape[1] for each in newest)
        if numel >= least * ranks and imbalance(costs, balanced(costs, ranks), ranks) <= _IMBALANCE:
            found.append(newest)
            newest = []
    return [*found, newest] if newest else found


class MuonShare(NamedTuple):
    """Of a rank: elements of matrices in its shards, FLOPs of its work in a step, elements of its buffers."""

    elements: int
    flops: int
    room: int
    sent: int  # elements that it sends to other ranks of its node


def muon_share(held: Mapping[int, Held], mesh: Mesh, steps: int) -> MuonShare:
    """That of the rank of `mesh`, with so many steps of Newton-Schulz."""
    ranks = len(mesh.ranks(*mesh.inside_node))
    made = [
        Round(work, held, mesh, Room(torch.empty(2**60, dtype=torch.uint8, device="meta")))
        for work in rounds([matrices_of(unit, each.layout) for unit, each in held.items()], ranks)
    ]
    return MuonShare(
        sum(len(elements) for one in made for elements in one.elements.values()),
        sum(
            len(batch) * flops(batch.shape[1], batch.shape[2], steps) for one in made for batch in one.batches
        ),
        max((one.room.used for one in made), default=0),
        sum(one.sent for one in made),
    )


class Room:
    """Memory of the buffers of one round, which those of the next one use too."""

    def __init__(self, flat: Tensor) -> None:
        self._flat, self.used = flat, 0

    def take(self, numel: int) -> Tensor:
        """A buffer (numel,) of its own."""
        start = self.used
        self.used += -(-numel // ALIGNMENT) * ALIGNMENT
        return self._flat[start : start + numel]


class Round:
    """The work of a round on one rank: the buffers, and which views are copied where.

    `updates`: what this rank has of the matrices of each unit, (n,); `batches`: the matrices of its work by
    shape, each (n, small, large).
    """

    def __init__(self, matrices: Sequence[Matrix], held: Mapping[int, Held], mesh: Mesh, room: Room) -> None:
        """`held`: how the states of each unit are cut."""
        ranks, self.room = mesh.ranks(*mesh.inside_node), room
        places = balanced([matrix.cost for matrix in matrices], len(ranks))
        owners = [ranks[place] for place in places]
        self.elements = {unit: held[unit].elements(mesh) for unit in sorted({each.unit for each in matrices})}
        self.updates = {unit: room.take(len(elements)) for unit, elements in self.elements.items()}
        work = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == mesh.rank]
        self.batches, views = _batches(work, room)
        own = iter(views)
        # By other rank: views of `updates` and of `batches`. Those that are sent both ways, and only back.
        mine, kept = ({rank: list[Tensor]() for rank in ranks} for _ in range(2))
        theirs, copies = ({rank: list[Tensor]() for rank in ranks} for _ in range(2))
        for matrix, owner in zip(matrices, owners, strict=True):
            unit = held[matrix.unit]
            senders = unit.senders(matrix, mesh, owner)
            whole = next(own) if owner == mesh.rank else None
            for rank in ranks if owner == mesh.rank else (mesh.rank,):
                for part in unit.parts(matrix, mesh.at(rank)):
                    if whole is not None:
                        (theirs if rank in senders else copies)[rank].append(whole[part.box])
                    if rank == mesh.rank:
                        flat = self.updates[matrix.unit][within(part.elements, self.elements[matrix.unit])]
                        shape = [side.stop - side.start for side in part.box]
                        (mine if rank in senders else kept)[owner].append(flat.view(shape))
        self._there = _Exchange(mesh.rank, mine, theirs, room)
        back = {rank: theirs[rank] + copies[rank] for rank in ranks}
        self._back = _Exchange(mesh.rank, back, {rank: mine[rank] + kept[rank] for rank in ranks}, room)

    @property
    def sent(self) -> int:
        """Elements that this rank sends to others, both ways."""
        return self._there.sent.numel() + self._back.sent.numel()

    def gather(self, stream: CommStream) -> None:
        """Fill `batches` from the updates of all ranks of the node."""
        self._there.run(stream)

    def scatter(self, stream: CommStream) -> None:
        """Fill the updates of all ranks of the node from `batches`."""
        self._back.run(stream)


class _Exchange:
    """Copies views of memory to views of other ranks' memory, which take them in the same order."""

    def __init__(
        self, rank: int, sources: dict[int, list[Tensor]], targets: dict[int, list[Tensor]], room: Room
    ) -> None:
        self._own = targets[rank], sources[rank]
        others = [other for other in sources if other != rank]
        self._sources = [view for other in others for view in sources[other]]
        self._targets = [view for other in others for view in targets[other]]
        self.sent, self._packed = _packed(self._sources, room)
        self._received, self._unpacked = _packed(self._targets, room)
        self._counts = _bytes_by_rank(targets, rank), _bytes_by_rank(sources, rank)

    def run(self, stream: CommStream) -> None:
        if self._own[0]:
            torch._foreach_copy_(*self._own)
        if self._packed:
            torch._foreach_copy_(self._packed, self._sources)
        received, sent = self._received.view(torch.uint8), self.sent.view(torch.uint8)
        stream.submit(lambda: stream.exchange(received, sent, self._counts)).wait()
        if self._unpacked:
            torch._foreach_copy_(self._targets, self._unpacked)


def _bytes_by_rank(views: dict[int, list[Tensor]], own: int) -> list[int]:
    """What is sent to, or received from each rank, of which one is this rank."""
    return [sum(view.nbytes for view in of) if rank != own else 0 for rank, of in views.items()]


def _packed(views: Sequence[Tensor], room: Room) -> tuple[Tensor, list[Tensor]]:
    """Memory for copies of all views one after the other, and the copies."""
    sizes = [view.numel() for view in views]
    flat = room.take(sum(sizes))
    return flat, [
        part.view(view.shape) for part, view in zip(flat.split(sizes), views, strict=True)
    ] if views else []


def _batches(matrices: Sequence[Matrix], room: Room) -> tuple[list[Tensor], list[Tensor]]:
    """Memory for matrices of each shape, (n, small, large), and a view of each in its own shape."""
    shapes = [(min(matrix.shape), max(matrix.shape)) for matrix in matrices]
    batches = {}
    for shape, count in Counter(shapes).items():
        batches[shape] = room.take(count * math.prod(shape)).view(count, *shape)
    each = {shape: iter(batch) for shape, batch in batches.items()}
    wide = [next(each[shape]) for shape in shapes]
    views = [one if tuple(one.shape) == m.shape else one.mT for one, m in zip(wide, matrices, strict=True)]
    return list(batches.values()), views
