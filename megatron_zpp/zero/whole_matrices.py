"""Whole matrices from the shards of a node's ranks, and back.

Muon looks at whole matrices. Each is the work of one rank of the node, by `balanced`, in rounds of units that
follow each other: an exchange brings the parts of a round's matrices to these ranks, and another brings back
what has become of them. Ranks that have the same states (stage 0, and what tensor ranks have whole) send
nothing on the way there: the rank that works has them too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import Box, Layout, Placement, overlap
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


class Round:
    """The work of a round on one rank: the buffers, and which views are copied where."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        held: Sequence[Held],
        updates: dict[int, tuple[range, Tensor]],
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`updates`: of each unit, elements of its buffer and their values (n,)."""
        ranks = mesh.ranks(*mesh.inside_node)
        places = balanced([matrix.cost for matrix in matrices], len(ranks))
        owners = [ranks[place] for place in places]
        self.batches, views = _batches(
            [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == mesh.rank],
            dtype,
            device,
        )
        own = iter(views)
        whole = {at: next(own) for at, owner in enumerate(owners) if owner == mesh.rank}
        mine: dict[int, list[Tensor]] = {rank: [] for rank in ranks}  # views of `updates`, by owner
        theirs: dict[int, list[Tensor]] = {rank: [] for rank in ranks}  # views of `batches`, by rank
        copies: dict[int, list[Tensor]] = {rank: [] for rank in ranks}  # the same, not sent on the way there
        kept: dict[int, list[Tensor]] = {rank: [] for rank in ranks}
        for at, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
            unit = held[matrix.unit]
            senders = unit.senders(matrix, mesh, owner)
            for rank in ranks if owner == mesh.rank else (mesh.rank,):
                sends = rank in senders
                for part in unit.parts(matrix, mesh.at(rank)):
                    if owner == mesh.rank:
                        (theirs if sends else copies)[rank].append(whole[at][part.box])
                    if rank == mesh.rank:
                        elements, flat = updates[matrix.unit]
                        start = part.elements.start - elements.start
                        shape = [side.stop - side.start for side in part.box]
                        view = flat[start : start + len(part.elements)].view(shape)
                        (mine if sends else kept)[owner].append(view)
        self._there = _Exchange(mesh.rank, mine, theirs, dtype, device)
        back = {rank: theirs[rank] + copies[rank] for rank in ranks}
        self._back = _Exchange(
            mesh.rank, back, {rank: mine[rank] + kept[rank] for rank in ranks}, dtype, device
        )

    def gather(self, stream: CommStream) -> None:
        """Fill `batches` from the updates of all ranks."""
        self._there.run(stream)

    def scatter(self, stream: CommStream) -> None:
        """Fill the updates of all ranks from `batches`."""
        self._back.run(stream)


class _Exchange:
    """Copies views of memory to views of other ranks' memory, which take them in the same order."""

    def __init__(
        self,
        rank: int,
        sources: dict[int, list[Tensor]],
        targets: dict[int, list[Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._own = targets[rank], sources[rank]
        ranks = sorted(sources)
        sources = {other: views for other, views in sources.items() if other != rank}
        targets = {other: views for other, views in targets.items() if other != rank}
        self._sent, self._packed, sizes = _packed(sources, dtype, device)
        self._received, self._unpacked, others = _packed(targets, dtype, device)
        self._targets = [view for views in targets.values() for view in views]
        self._sources = [view for views in sources.values() for view in views]
        self._counts = [others.get(each, 0) for each in ranks], [sizes.get(each, 0) for each in ranks]

    def run(self, stream: CommStream) -> None:
        if self._own[0]:
            torch._foreach_copy_(*self._own)
        if self._packed:
            torch._foreach_copy_(self._packed, self._sources)
        received, sent = self._received.view(torch.uint8), self._sent.view(torch.uint8)
        stream.submit(lambda: stream.exchange(received, sent, self._counts)).wait()
        if self._unpacked:
            torch._foreach_copy_(self._targets, self._unpacked)


def _packed(
    views: dict[int, list[Tensor]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor], dict[int, int]]:
    """Memory for copies of all views one after the other, the copies, and the bytes of each rank."""
    each = [view for of_rank in views.values() for view in of_rank]
    flat = torch.empty(sum(view.numel() for view in each), dtype=dtype, device=device)
    copies = [
        part.view(view.shape) for part, view in zip(flat.split([v.numel() for v in each]), each, strict=True)
    ]
    return flat, copies, {rank: sum(v.numel() for v in of) * dtype.itemsize for rank, of in views.items()}


def _batches(
    matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Memory for matrices of each shape, (n, small, large), and a view of each in its own shape."""
    shapes = [tuple(sorted(matrix.shape)) for matrix in matrices]
    batches = {
        shape: torch.empty(shapes.count(shape), *shape, dtype=dtype, device=device)
        for shape in dict.fromkeys(shapes)
    }
    rows = {shape: iter(batch) for shape, batch in batches.items()}
    views = []
    for matrix, shape in zip(matrices, shapes, strict=True):
        one = next(rows[shape])
        views.append(one if tuple(matrix.shape) == shape else one.mT)
    return list(batches.values()), views
