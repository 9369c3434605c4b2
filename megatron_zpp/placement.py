"""Where each element of each parameter is: arithmetic on values.

A parameter may be split along one dimension among the ranks of an axis. The parts of a rank's parameters lie
one after the other in the flat buffer of their unit, a `Layout`, and that buffer is cut over the shard axes.
`Layout.pieces` answers the only question: which elements of which parameter lie where. Checkpoints,
initialisation, optimizers, norms and plans are loops over pieces.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, product

from megatron_zpp.mesh import Axis, Mesh

ALIGNMENT = 128  # elements, at least: views start at 256 bytes even in 16-bit formats, for matrix kernels
SHARD_MULTIPLE = 256  # elements: a shard holds whole quantisation blocks of this size and smaller

Box = tuple[slice, ...]  # a part of a parameter, by dimension


@dataclass(frozen=True)
class Split:
    """Dimension `dim` of a parameter is cut among the ranks of `axis`, each of its `runs` by itself.

    `runs` are the lengths of consecutive parts of the dimension: the rows of queries, keys and values of an
    attention layer, or gate and value of SwiGLU. Place t of the axis has part t of the first run, then part t
    of the second, and so on. The size of the axis divides every run.
    """

    dim: int
    runs: tuple[int, ...]
    axis: Axis

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the parameter whose parts have the shape `local`."""
        return (*local[: self.dim], sum(self.runs), *local[self.dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One parameter of a unit.

    `shape` is that of the whole parameter. Placements are equal where they lie alike in a buffer, whatever
    their names.
    """

    name: str = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)
    split: Split | None = field(default=None, compare=False)
    decays: bool = True  # whether the optimizer applies weight decay
    decoupled: bool = field(default=False, compare=False)  # whether it has the second learning rate
    rate_factor: float = field(default=1.0, compare=False)  # of the learning rate and Adam's epsilon
    coded: bool = False  # whether it is gathered as codes, a byte each
    # Of a parameter that Muon trains: the rows of each matrix in it, of the whole parameter; else none.
    matrices: tuple[int, ...] = field(default=(), compare=False)
    numel: int = field(init=False)  # the elements of `local_shape`

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.local_shape))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one rank has while the unit is gathered."""
        shape = list(self.shape)
        if self.split is not None:
            shape[self.split.dim] //= self.split.axis.size
        return tuple(shape)

    def shards(self, mesh: Mesh) -> tuple[Axis, ...]:
        """The axes of the ranks that share its states, because they have the same part of it."""
        return mesh.shards if self.split is None else mesh.shards_beside(self.split.axis)

    def parts(self, rank: int) -> tuple[tuple[Box, Box], ...]:
        """Where each part of what a rank has is in an array of `local_shape`, and in the whole parameter."""
        return tuple(_parts(tuple(slice(0, side) for side in self.local_shape), self, rank))


@dataclass(frozen=True)
class Block:
    """Consecutive elements of a rank's part of a parameter that make up a box."""

    elements: range  # of the flat `local_shape`
    shape: tuple[int, ...]
    parts: tuple[tuple[Box, Box], ...]  # where each part is in the block, and in the whole parameter


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter in a unit's buffer."""

    placement: Placement
    elements: range  # of the flat `local_shape`
    at: range  # where they are in the buffer

    def blocks(self, rank: int) -> Iterator[Block]:
        """The same elements as boxes, in their order: at most 2 · dimensions − 1.

        `rank` says which part of a split parameter they are of.
        """
        start = self.elements.start
        for box in _boxes(self.placement.local_shape, start, self.elements.stop):
            shape = tuple(side.stop - side.start for side in box)
            elements = range(start, start + math.prod(shape))
            yield Block(elements, shape, tuple(_parts(box, self.placement, rank)))
            start = elements.stop


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parameters of a unit one after the other in a flat buffer, which is cut over `axes`.

    `axes`: one inside nodes and one between them: the shard axes of a mesh, or what is left of them where
    parameters are split along shard axes. What is split along all of an axis leaves one rank of it.

    Every parameter starts at a multiple of `alignment`. If that is the largest quantisation block, no block
    holds elements of two parameters, whose magnitudes may differ. The end is padded, so that any sizes fit
    any number of ranks. Gaps are zero and stay zero.

    Coded parameters come first. Then every element of the buffer stands for a byte of what is gathered. The
    other parameters of the unit, the wide ones, take two bytes each, so the buffer has a gap behind them that
    is as long as they are. No shard boundary divides the two, so that one rank has both bytes of each wide
    parameter:

        elements of the buffer        codes   codes | codes   gap   wide   gap |
        bytes of what is gathered     codes   codes | codes   gap   wide       |
                                            shard 0 |                  shard 1 |
    """

    placements: tuple[Placement, ...]
    axes: tuple[Axis, ...]
    multiple: int = SHARD_MULTIPLE  # of a shard's elements
    alignment: int = ALIGNMENT  # of a parameter's first element
    frozen: bool = False  # whether the parameters are not trained

    @cached_property
    def coded(self) -> bool:
        """Whether some parameters are gathered as codes."""
        return any(placement.coded for placement in self.placements)

    @cached_property
    def different_ranks(self) -> range:
        """The first ranks with each of the parts into which parameters are split; rank 0 if none is."""
        splits = (placement.split.axis.ranks for placement in self.placements if placement.split is not None)
        return max(splits, key=len, default=range(1))

    @cached_property
    def shards(self) -> int:
        """The number of equal shards."""
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def shard_numel(self) -> int:
        codes, wide = self._codes_and_wide
        if not codes:
            return _round_up(-(-wide // self.shards), self.multiple)
        least = max(-(-(codes + 2 * wide) // self.shards), 2 * wide)
        return _round_up(least, math.lcm(self.multiple, self.alignment))  # a shard may begin with the wide

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, gaps and padding included."""
        return self.shard_numel * self.shards

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each parameter."""
        sizes = [(_round_up(each.numel, self.alignment), each.coded) for each in self.placements]
        starts = accumulate((size for size, coded in sizes if coded), initial=0)
        wide = accumulate((size for size, coded in sizes if not coded), initial=self.wide.start)
        return tuple(next(starts if coded else wide) for _, coded in sizes)

    @cached_property
    def wide(self) -> range:
        """The elements from the first wide parameter on, up to the gap or the padding behind them."""
        codes, wide = self._codes_and_wide
        start = codes
        if codes and wide and codes // self.shard_numel != (codes + 2 * wide - 1) // self.shard_numel:
            start = _round_up(codes, self.shard_numel)
        return range(start, start + wide)

    @cached_property
    def _codes_and_wide(self) -> tuple[int, int]:
        """The elements of coded parameters, and of the others; gaps between them count."""
        sizes = [(_round_up(each.numel, self.alignment), each.coded) for each in self.placements]
        codes = sum(size for size, coded in sizes if coded)
        return codes, sum(size for size, _ in sizes) - codes

    def shard(self, mesh: Mesh) -> range:
        first = mesh.index(*self.axes) * self.shard_numel
        return range(first, first + self.shard_numel)

    def ranges(self, mesh: Mesh, over: Sequence[Axis] | None = None) -> list[range]:
        """The elements that a rank has where the unit is cut over some of its axes alone: one range, or more.

        By default it is cut over all of them: the rank's shard. `over=()`: the whole unit.
        """
        if over is None:
            return [self.shard(mesh)]
        numel = self.shard_numel
        return [
            range(first * numel, stop * numel) for first, stop in _runs(self.axes, tuple(over), mesh.rank)
        ]

    def pieces(self, mesh: Mesh, over: Sequence[Axis] | None = None) -> Iterator[Piece]:
        """The parts of parameters in `ranges`, in the order of the buffer."""
        for elements in self.ranges(mesh, over):
            yield from self.pieces_in(elements)

    def pieces_in(self, elements: range) -> Iterator[Piece]:
        """The parts of parameters in a range of the buffer."""
        for placement, offset in zip(self.placements, self.offsets, strict=True):
            start, stop = max(offset, elements.start), min(offset + placement.numel, elements.stop)
            if start < stop:
                yield Piece(placement, range(start - offset, stop - offset), range(start, stop))

    def hull(self, *, of_matrices: bool) -> range:
        """From the first to the last parameter that Muon trains, or does not; empty if there is none."""
        chosen = [
            range(offset, offset + each.numel)
            for each, offset in zip(self.placements, self.offsets, strict=True)
            if bool(each.matrices) == of_matrices
        ]
        return range(chosen[0].start, chosen[-1].stop) if chosen else range(0)

    def gaps_in(self, elements: range) -> tuple[slice, ...]:
        """What no parameter has of a range of the buffer, as parts of memory of these elements."""
        used = [piece.at for piece in self.pieces_in(elements)]
        starts = [elements.start, *(at.stop for at in used)]
        stops = [*(at.start for at in used), elements.stop]
        gaps = (range(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)
        return tuple(within(gap, elements) for gap in gaps)


@cache
def _runs(axes: tuple[Axis, ...], over: tuple[Axis, ...], rank: int) -> list[tuple[int, int]]:
    """Runs of shards, as (first, last + 1), that `rank` has of `axes` if the cut is `over` some of them."""
    found: list[tuple[int, int]] = []
    for shard, place in enumerate(product(*(range(axis.size) for axis in axes))):
        there = sum(axis.stride * at for axis, at in zip(axes, place, strict=True))
        if all(axis.index(there) == axis.index(rank) for axis in over):
            start = found.pop()[0] if found and found[-1][1] == shard else shard
            found.append((start, shard + 1))
    return found


def within(part: range, whole: range) -> slice:
    """Where `part` of a buffer is in memory of the elements `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)


def overlap(first: range, second: range) -> range:
    """The elements of both; empty, at the start of `second`, if there are none."""
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return range(start, stop) if start < stop else range(second.start, second.start)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes of an array that have its flat elements from `start` to `stop`, in this order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (slice(start, stop),) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are wanted whole
    if first > last:  # less than a row
        for box in _boxes(shape[1:], start - last * row, stop - last * row):
            yield slice(last, first), *box
        return
    for box in _boxes(shape[1:], start % row, row) if start < first * row else ():
        yield slice(first - 1, first), *box
    if first < last:
        yield slice(first, last), *(slice(0, size) for size in shape[1:])
    for box in _boxes(shape[1:], 0, stop % row):
        yield slice(last, last + 1), *box


def _parts(box: Box, placement: Placement, rank: int) -> Iterator[tuple[Box, Box]]:
    """A box of a rank's part of a parameter as boxes of the whole one; see `Block.parts`."""
    inside = tuple(slice(0, side.stop - side.start) for side in box)
    split = placement.split
    if split is None:
        yield inside, box
        return
    dim, axis = split.dim, split.axis
    local = whole = 0  # where the run begins
    for run in split.runs:
        part = run // axis.size
        start, stop = max(box[dim].start, local), min(box[dim].stop, local + part)
        if start < stop:
            here = slice(start - box[dim].start, stop - box[dim].start)
            moved = whole + axis.index(rank) * part - local
            there = slice(start + moved, stop + moved)
            yield (*inside[:dim], here, *inside[dim + 1 :]), (*box[:dim], there, *box[dim + 1 :])
        local, whole = local + part, whole + run


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
