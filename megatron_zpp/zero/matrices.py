"""Which rank of a node orthogonalises which matrices, and whose elements it needs: arithmetic on values.

Muon needs whole matrices, and a rank holds shards. So the ranks of a node exchange shards for whole matrices,
some units at a time, and the updates back. States are cut over these ranks alone: every node orthogonalises
all matrices, and nothing of this crosses between nodes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_zpp.placement import Layout, Placement, within

IMBALANCE, PADDING = 0.10, 0.05  # of an exchange, if fewer units than all can have less


@dataclass(frozen=True)
class Matrix:
    """A matrix of a unit, or one of several that lie in a parameter one below the other."""

    unit: int
    placement: Placement
    elements: range  # of the unit's buffer
    shape: tuple[int, int]

    @property
    def flops(self) -> int:
        """Those of one Newton-Schulz iteration: X · Xᵀ, its square, and their polynomial times X."""
        low, high = sorted(self.shape)
        return 4 * low * low * high + 2 * low**3


@dataclass(frozen=True)
class Exchange:
    """Matrices of consecutive units, each whole on the rank at one place of the axes that share them."""

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]  # the place of each
    places: int

    def owned(self, place: int) -> dict[tuple[int, int], list[Matrix]]:
        """The matrices of a place by shape, to be orthogonalised in a batch each."""
        found: dict[tuple[int, int], list[Matrix]] = {}
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if owner == place:
                found.setdefault(matrix.shape, []).append(matrix)
        return found

    def parts(self, place: int, shards: Sequence[range]) -> list[slice]:
        """Where a rank has elements that the rank at `place` needs, one matrix after the other.

        `shards`: by unit, the elements of which the rank has the states; a slice is one of its shard.
        """
        found = []
        for matrix in (matrix for batch in self.owned(place).values() for matrix in batch):
            shard = shards[matrix.unit]
            start, stop = max(shard.start, matrix.elements.start), min(shard.stop, matrix.elements.stop)
            found.append(within(range(start, max(start, stop)), shard))
        return found

    @cached_property
    def rooms(self) -> list[int]:
        """The elements of the matrices of each place."""
        return self._sums(lambda matrix: len(matrix.elements))

    @property
    def padding(self) -> float:
        """How much more memory all places have than matrices, if each has the room of the fullest."""
        return self.places * max(self.rooms) / sum(self.rooms) - 1

    @property
    def imbalance(self) -> float:
        """By how much the busiest place has more FLOPs than all have on average."""
        flops = self._sums(lambda matrix: matrix.flops)
        return self.places * max(flops) / sum(flops) - 1

    def _sums(self, size: Callable[[Matrix], int]) -> list[int]:
        sums = [0] * self.places
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            sums[owner] += size(matrix)
        return sums


def matrices_of(
    layouts: Sequence[Layout], runs_of: Callable[[Placement], Sequence[int]]
) -> list[list[Matrix]]:
    """The matrices of each unit: parameters with two dimensions, as this rank's tensor split leaves them.

    `runs_of`: the rows of each matrix of a parameter, such as queries, keys and values; none if Muon does not
    change the parameter.
    """
    found: list[list[Matrix]] = []
    for unit, layout in enumerate(layouts):
        found.append([])
        for placement, offset in zip(layout.placements, layout.offsets, strict=True):
            for rows in runs_of(placement):
                columns = placement.local_shape[1]
                elements = range(offset, offset + rows * columns)
                found[-1].append(Matrix(unit, placement, elements, (rows, columns)))
                offset = elements.stop
    return found


def exchanges(units: Sequence[Sequence[Matrix]], places: int) -> tuple[Exchange, ...]:
    """Exchanges of as few units each as keep all places about equally busy; else of all units together.

    `units`: the matrices of each unit, in the order of the optimizer. Units without matrices join none.
    """
    units = [unit for unit in units if unit]
    for count in range(1, len(units) + 1):
        starts = range(0, len(units) - count + 1, count)  # the last one has what is left
        ends = [*starts[1:], len(units)]
        made = tuple(
            _assigned([matrix for unit in units[start:end] for matrix in unit], places)
            for start, end in zip(starts, ends, strict=True)
        )
        if all(each.imbalance <= IMBALANCE and each.padding <= PADDING for each in made):
            return made
    return (_assigned([matrix for unit in units for matrix in unit], places),) if units else ()


def _assigned(matrices: Iterable[Matrix], places: int) -> Exchange:
    """The largest matrices first, each to the place that has least to do; ties to the one with most room."""
    flops, rooms = [0] * places, [0] * places
    owners: dict[Matrix, int] = {}
    ordered = sorted(matrices, key=lambda matrix: -matrix.flops)
    for matrix in ordered:
        place = min(range(places), key=lambda at: (flops[at], rooms[at], at))
        owners[matrix] = place
        flops[place] += matrix.flops
        rooms[place] += len(matrix.elements)
    return Exchange(tuple(ordered), tuple(owners.values()), places)
