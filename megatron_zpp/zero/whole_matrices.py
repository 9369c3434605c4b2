"""Whole matrices from the shards of a node's ranks, and back.

Muon looks at whole matrices. Each is the work of one rank of the node, by `balanced`, in rounds of units that
follow each other: an exchange brings the parts of a round's matrices to these ranks, and another brings back
what has become of them. A round's first exchange runs while the matrices of the round before are worked on,
so rounds take turns in two rooms. Ranks that have the same states (stage 0, and what tensor ranks have whole)
send nothing on the way there: the rank that works has them too. Parts are written where they are sent from,
or in their matrix if this rank works on it, and used where they arrive.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import ALIGNMENT, Box, Layout, Placement, overlap, within
from megatron_zpp.zero.newton_schulz import flops, working_numel
from megatron_zpp.zero.unit_plan import UnitPlan

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
        return len(self.rows), self.placement.shape[1]

    @property
    def cost(self) -> int:
        """What a step of Newton-Schulz computes."""
        return flops(*self.shape, steps=1)


class Part(NamedTuple):
    """A part of a matrix that a rank has: consecutive elements of its shard of the unit."""

    elements: range  # of the unit's buffer
    box: Box  # in the matrix


def parts_of(matrix: Matrix, weights: UnitPlan, mesh: Mesh) -> Iterator[Part]:
    """What the rank of `mesh` has of a matrix of a unit, in the order of its shard."""
    for piece in weights.layout.pieces(mesh, weights.axes):
        if piece.placement is not matrix.placement:
            continue
        for block in piece.blocks(mesh.rank):
            for here, there in block.parts:
                if rows := overlap(range(there[0].start, there[0].stop), matrix.rows):
                    first = here[0].start + rows.start - there[0].start
                    start = piece.at.start + block.elements.start - piece.elements.start
                    start += first * block.shape[1]
                    elements = range(start, start + len(rows) * block.shape[1])
                    yield Part(elements, (within(rows, matrix.rows), there[1]))


def _senders(matrix: Matrix, weights: UnitPlan, mesh: Mesh, owner: int) -> list[int]:
    """The ranks of a node that bring a matrix together at `owner`: one of those with equal parts."""
    split = () if matrix.placement.split is None else (matrix.placement.split.axis,)
    alike = [axis for axis in mesh.inside_node if axis not in (*weights.axes, *split)]
    ranks = mesh.ranks(*mesh.inside_node)
    return [rank for rank in ranks if all(axis.index(rank) == axis.index(owner) for axis in alike)]


def matrices_of(unit: int, layout: Layout) -> list[Matrix]:
    found = []
    for placement in layout.placements:
        start = 0
        for rows in placement.matrices:
            found.append(Matrix(unit, placement, range(start, start + rows)))
            start += rows
    return found


def balanced(costs: Sequence[int], ranks: int) -> tuple[list[int], float]:
    """The place of each of so many costs, and the largest load over the mean.

    The largest cost comes first, and each goes where there is the least so far.
    """
    places, load = [0] * len(costs), [0] * ranks
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        places[at] = min(range(ranks), key=load.__getitem__)
        load[places[at]] += costs[at]
    return places, max(load) * ranks / max(1, sum(load))


def rounds(layouts: Sequence[Layout], ranks: int) -> list[list[Matrix]]:
    """Matrices that are worked on at the same time: of as few units in a row as balance the ranks."""
    found: list[list[Matrix]] = []
    newest: list[Matrix] = []
    for unit, layout in enumerate(layouts):
        newest = newest + matrices_of(unit, layout)
        costs, numel = [each.cost for each in newest], sum(each.shape[0] * each.shape[1] for each in newest)
        if numel >= _LEAST * ranks and balanced(costs, ranks)[1] <= _IMBALANCE:
            found.append(newest)
            newest = []
    return [*found, newest] if newest else found


class MuonShare(NamedTuple):
    """Of a rank: elements of matrices in its shards, FLOPs of its work in a step, elements of its buffers."""

    elements: int
    flops: int
    worked: int  # elements of the matrices of its work
    rooms: int  # in which rounds take turns: two where there is something to exchange ahead
    room: int  # elements of one of them
    working: int  # elements of what Newton-Schulz makes beside them
    sent: int  # elements that it sends to other ranks of its node
    rows: int  # moments of rows, if there are some


def muon_share(units: Sequence[UnitPlan], mesh: Mesh, steps: int) -> MuonShare:
    """That of the rank of `mesh`, with so many steps of Newton-Schulz."""
    made = [
        Round(work, units, mesh, Room(torch.empty(2**60, dtype=torch.uint8, device="meta")))
        for work in rounds([each.layout for each in units], mesh.node_size)
    ]
    owned = [each.layout.ranges(mesh, each.axes)[0] for each in units]
    hulls = [each.layout.hull(of_matrices=True) for each in units]
    return MuonShare(
        sum(map(len, map(overlap, owned, hulls))),
        sum(
            len(batch) * flops(batch.shape[1], batch.shape[2], steps) for one in made for batch in one.batches
        ),
        sum(batch.numel() for one in made for batch in one.batches),
        2 if len(made) > 1 and mesh.node_size > 1 else 1,
        max((one.room.used for one in made), default=0),
        max((working_numel(batch) for one in made for batch in one.batches), default=0),
        sum(one.sent for one in made),
        sum(one.rows for one in made),
    )


class Room:
    """Memory of the buffers of one round, which those of later ones use too."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.used = flat, 0

    def take(self, numel: int) -> Tensor:
        """A buffer (numel,) of its own."""
        start = self.used
        self.used += -(-numel // ALIGNMENT) * ALIGNMENT
        return self.flat[start : start + numel]


class Place(NamedTuple):
    """A part of a matrix that this rank has, and from which element on a round's room has it."""

    matrix: Matrix
    elements: range  # of the unit's buffer
    there: int | None  # what is made orthogonal; None: another rank brings it
    back: int  # what has become of it


class Round:
    """The work of a round on one rank: the buffers, and which views are copied where.

    `places`: the parts of the matrices of each unit that this rank has, in the order of its shard.
    `matrices`: the work of each rank of the node, in the order of its batches.
    `batches`: the matrices of the work of this one by shape, each (n, rows, columns).
    """

    def __init__(self, matrices: Sequence[Matrix], units: Sequence[UnitPlan], mesh: Mesh, room: Room) -> None:
        """`units` say how the states of each are cut."""
        ranks, self.room = mesh.ranks(*mesh.inside_node), room
        places_of_work, _ = balanced([matrix.cost for matrix in matrices], len(ranks))
        owners = [ranks[place] for place in places_of_work]
        self.matrices = [
            _by_shape([matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank])
            for rank in ranks
        ]
        shapes = Counter(matrix.shape for matrix in self.matrices[ranks.index(mesh.rank)])
        self.batches = [
            room.take(count * math.prod(shape)).view(count, *shape) for shape, count in shapes.items()
        ]
        wholes = {tuple(batch.shape[1:]): iter(batch) for batch in self.batches}
        places = list[Place]()
        # Of what is no run of elements of its matrix here: the other rank, whether it is sent both ways or
        # back alone, and a part of this rank, or a view of `batches`. Both are sorted: first what stays.
        gives, takes = list[tuple[int, bool, Matrix, range]](), list[tuple[int, bool, Tensor]]()
        for matrix, owner in zip(matrices, owners, strict=True):
            unit = units[matrix.unit]
            senders = _senders(matrix, unit, mesh, owner)
            whole = next(wholes[matrix.shape]) if owner == mesh.rank else None
            for rank in ranks if owner == mesh.rank else (mesh.rank,):
                for part in parts_of(matrix, unit, mesh.at(rank)):
                    view = None if whole is None else whole[part.box]
                    if rank == mesh.rank and view is not None and view.is_contiguous():
                        places.append(Place(matrix, part.elements, _start(view), _start(view)))
                        continue
                    if view is not None:
                        takes.append((rank, rank in senders, view))
                    if rank == mesh.rank:
                        gives.append((owner, rank in senders, matrix, part.elements))
        gives.sort(key=lambda each: (each[0] != mesh.rank, each[0], not each[1]))
        takes.sort(key=lambda each: (each[0] != mesh.rank, each[0], not each[1]))
        others = [(rank, both, view) for rank, both, view in takes if rank != mesh.rank]
        # The memory of what is sent there has what comes back, and the other way around.
        ours = room.take(sum(len(elements) for *_, elements in gives))
        theirs = room.take(sum(view.numel() for *_, view in others))
        leaving = _Cut(ours, [(rank, len(elements)) for rank, both, _, elements in gives if both], mesh)
        returned = _Cut(ours, [(rank, len(elements)) for rank, *_, elements in gives], mesh)
        arrived = _Cut(theirs, [(rank, view.numel()) for rank, both, view in others if both], mesh)
        replies = _Cut(theirs, [(rank, view.numel()) for rank, _, view in others], mesh)
        self._there, self._back = (leaving, arrived), (replies, returned)
        stay = leaving.parts[: len(takes) - len(others)]
        self._unpacked = _pairs([view for _, both, view in takes if both], [*stay, *arrived.parts])
        self._packed = _pairs([view for *_, view in takes], [*stay, *replies.parts])
        starts = map(_start, leaving.parts)
        for (_, both, matrix, elements), back in zip(gives, returned.parts, strict=True):
            places.append(Place(matrix, elements, next(starts) if both else None, _start(back)))
        places.sort(key=lambda place: place.elements.start)
        self.places = {
            unit: [place for place in places if place.matrix.unit == unit]
            for unit in sorted({matrix.unit for matrix in matrices})
        }

    @property
    def sent(self) -> int:
        """Elements that this rank sends to others, both ways."""
        return sum(cut.of_others.numel() for cut, _ in (self._there, self._back))

    @property
    def rows(self) -> int:
        """Rows of the matrices of all ranks, as many for each as for the one that has most."""
        most = max(sum(len(matrix.rows) for matrix in matrices) for matrices in self.matrices)
        return most * len(self.matrices)

    def gather(self, stream: CommStream) -> Pending:
        """Bring what all ranks of the node have written to the `there` of their places to their matrices."""

        def bring() -> None:
            _exchange(stream, *self._there)
            if self._unpacked[0]:
                views, flats = self._unpacked
                torch._foreach_copy_(views, flats)

        return stream.submit(bring)

    def scatter(self, stream: CommStream) -> None:
        """Fill the `back` of the places of all ranks of the node from `batches`."""
        if self._packed[0]:
            views, flats = self._packed
            torch._foreach_copy_(flats, views)
        stream.submit(lambda: _exchange(stream, *self._back)).wait()


class _Cut:
    """Memory in consecutive parts, each of a rank from which it comes or to which it goes: first what stays.

    `counts`: bytes by rank of the node, and 0 of this one.
    """

    def __init__(self, flat: Tensor, sizes: Sequence[tuple[int, int]], mesh: Mesh) -> None:
        """`sizes`: the rank and the elements of each part."""
        numels = Counter[int]()
        for rank, numel in sizes:
            numels[rank] += numel
        used = flat[: numels.total()]
        self.parts = used.split([numel for _, numel in sizes])
        self.of_others = used[numels.pop(mesh.rank, 0) :]
        self.counts = [numels[rank] * flat.itemsize for rank in mesh.ranks(*mesh.inside_node)]


def _exchange(stream: CommStream, sent: _Cut, received: _Cut) -> None:
    """Send memory to other ranks, and receive theirs."""
    counts = received.counts, sent.counts
    stream.exchange(received.of_others.view(torch.uint8), sent.of_others.view(torch.uint8), counts)


def _start(part: Tensor) -> int:
    """Its first element in the room."""
    return int(part.storage_offset())


def _pairs(views: list[Tensor], flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Views of matrices, and consecutive memory in their shapes."""
    return views, [flat.view(view.shape) for view, flat in zip(views, flats, strict=True)]


def _by_shape(matrices: Sequence[Matrix]) -> list[Matrix]:
    """The same, those of a shape one after the other, in the order of the first of each shape."""
    shapes = list(dict.fromkeys(matrix.shape for matrix in matrices))
    return sorted(matrices, key=lambda matrix: shapes.index(matrix.shape))
