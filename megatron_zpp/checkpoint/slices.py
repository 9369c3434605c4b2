"""Where saved parts have the elements of a reader's part, for any two numbers of tensor ranks: arithmetic.

A parameter split along a dimension of F entries is A × F × B elements: A is the product of the dimensions
before, B of the dimensions behind. Each of T tensor ranks has A rows of (F / T) · B columns, row after row.
With A = 1, as for split outputs and the vocabulary, a few contiguous ranges make up a part. With A > 1, as
for split inputs, whole rows of saved parts are read, and columns of them are cut.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.distributed.split import Split

BLOCK_ELEMENTS = 1 << 24  # of rows read at once: 64 MiB, 16 chunks of a file

# Fills the target with elements of the part of a saved tensor rank, from the element of that number on.
ReadInto = Callable[[int, int, Tensor], None]


class Part(NamedTuple):
    """One of `ranks` equal parts of a parameter; without a split, every rank has the whole."""

    split: Split | None
    ranks: int
    rank: int

    def ranges(self, size: int) -> list[range]:
        """Where the part lies in the split dimension of `size` entries, in the order of its own entries."""
        return [range(size)] if self.split is None else self.split.indices(self.ranks, self.rank)

    def share(self, size: int) -> int:
        """How many of `size` entries of the split dimension the part has."""
        return size if self.split is None else size // self.ranks


@dataclass(frozen=True)
class Sharing:
    """How `ranks` tensor ranks share parameters by name, and which of them this is. The default: one rank."""

    splits: Mapping[str, Split] = field(default_factory=dict)
    ranks: int = 1
    rank: int = 0

    def part(self, name: str, rank: int | None = None) -> Part:
        """The part of a parameter that this rank has, or another one."""
        return Part(self.splits.get(name), self.ranks, self.rank if rank is None else rank)


UNSHARED = Sharing()


def same_part(saved: Part, wanted: Part) -> int | None:
    """The tensor rank that has saved exactly the wanted part of a parameter; None if none has.

    Every tensor rank has saved a copy of a parameter that is not split. With as many tensor ranks as saved,
    each reads its own file alone, in runs that such parameters do not interrupt. Otherwise all ranks read the
    copy of tensor rank 0, so that they agree whatever the copies are.
    """
    if wanted.ranks == saved.ranks and wanted.split == saved.split:
        return wanted.rank
    return 0 if all(part.split is None or part.ranks == 1 for part in (saved, wanted)) else None


class Columns(NamedTuple):
    """`length` columns of a row, from `source` on in the saved part and from `target` on in the reader's."""

    source: int
    target: int
    length: int


class Read(NamedTuple):
    """Contiguous elements of the part of a saved tensor rank: as many rows as the block has."""

    rank: int
    elements: range
    columns: tuple[Columns, ...]


class Block(NamedTuple):
    """Elements of the reader's part: rows of `width` elements, which the reads make up together."""

    destination: range
    width: int
    reads: tuple[Read, ...]


def blocks(
    shape: Sequence[int],
    saved: Sharing,
    name: str,
    wanted: Part,
    elements: range,
    *,
    most: int = BLOCK_ELEMENTS,
) -> Iterator[Block]:
    """The blocks that hold `elements` of the part `wanted` of parameter `name`, whose whole shape is `shape`.

    At least one side splits the parameter, and both along the same dimension. A block may hold more than
    `elements` where these begin or end inside of a row. No read has more than `most` elements, or one row.
    A parameter that is not split is read from tensor rank 0.
    """
    split = wanted.split or saved.splits.get(name)
    assert split is not None, f"{name} is split by neither side"
    if not elements:
        return
    size, behind = shape[split.dim], math.prod(shape[split.dim + 1 :])
    found = {
        rank: columns
        for rank in range(saved.ranks if name in saved.splits else 1)
        if (columns := _columns(size, behind, saved.part(name, rank), wanted))
    }
    if math.prod(shape[: split.dim]) == 1:
        yield from _contiguous(found, elements)
        return
    width, saved_width = (part.share(size) * behind for part in (wanted, saved.part(name, 0)))
    for rows in _rows(elements, width, max(1, most // max(width, saved_width))):
        saved_elements = range(rows.start * saved_width, rows.stop * saved_width)
        reads = tuple(Read(rank, saved_elements, columns) for rank, columns in found.items())
        yield Block(range(rows.start * width, rows.stop * width), width, reads)


def fill(found: Tensor, elements: range, blocks: Iterator[Block], read_into: ReadInto) -> None:
    """Fill the one-dimensional CPU tensor `found` with `elements` of a part, which are in `blocks`."""
    for block in blocks:
        start = max(block.destination.start, elements.start)
        stop = min(block.destination.stop, elements.stop)
        target = place = found[start - elements.start : stop - elements.start]
        if len(place) < len(block.destination):  # a row of which only some elements are wanted
            target = torch.empty(len(block.destination), dtype=found.dtype)
        rows = target.view(-1, block.width)
        for read in block.reads:
            if read.columns == (Columns(0, 0, block.width),) and len(read.elements) == len(target):
                read_into(read.rank, read.elements.start, target)
                continue
            saved = torch.empty(len(read.elements), dtype=found.dtype)
            read_into(read.rank, read.elements.start, saved)
            saved = saved.view(len(rows), -1)
            for source, column, length in read.columns:
                rows[:, column : column + length] = saved[:, source : source + length]
        if target is not place:
            place.copy_(target[start - block.destination.start :][: stop - start])


def _columns(size: int, behind: int, saved: Part, wanted: Part) -> tuple[Columns, ...]:
    """The columns of a row that a saved part and the wanted part both have."""
    found, source = [], 0
    for theirs in saved.ranges(size):
        target = 0
        for ours in wanted.ranges(size):
            start, stop = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
            if start < stop:
                first, place = source + start - theirs.start, target + start - ours.start
                found.append(Columns(first * behind, place * behind, (stop - start) * behind))
            target += len(ours)
        source += len(theirs)
    return tuple(found)


def _contiguous(found: Mapping[int, tuple[Columns, ...]], elements: range) -> Iterator[Block]:
    """Blocks of parts that are one row each: the columns of each saved part that are in `elements`."""
    for rank, columns in found.items():
        for source, target, length in columns:
            start, stop = max(target, elements.start), min(target + length, elements.stop)
            if start < stop:
                first, count = source + start - target, stop - start
                read = Read(rank, range(first, first + count), (Columns(0, 0, count),))
                yield Block(range(start, stop), count, (read,))


def _rows(elements: range, width: int, most: int) -> Iterator[range]:
    """The rows that hold `elements`, at most `most` at once; a row that is not wanted whole comes alone."""
    first, last = elements.start // width, -(-elements.stop // width)
    begin, end = -(-elements.start // width), elements.stop // width  # the rows that are wanted whole
    if first < begin:
        yield range(first, begin)
    for row in range(begin, end, most):
        yield range(row, min(row + most, end))
    if max(begin, end) < last:
        yield range(last - 1, last)
