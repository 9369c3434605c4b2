"""Fills parts of parameters from the parts that a checkpoint has, whichever ranks have parts."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from megatron_zpp.placement import Box, Piece, Placement, within

MOST_ELEMENTS = 1 << 24  # of rows read at once: 64 MiB, 16 chunks of a file

# Fills the target (n,) with elements of what a saved rank has, from the element of that number on.
ReadInto = Callable[[int, int, Tensor], None]


def fill(
    target: Tensor,
    piece: Piece,
    rank: int,
    saved: Placement,
    read_into: ReadInto,
    *,
    first_row: int = 0,
    copy: int = 0,
    most: int = MOST_ELEMENTS,
) -> None:
    """Fill the CPU tensor `target` (len(piece.elements),) with what `saved` has of the elements of a piece.

    `saved` is where the parameter is, or some of its rows from `first_row` on. `rank` says which part of a
    split parameter the piece is of. Where all saved tensor ranks have the whole parameter, the one of tensor
    rank `copy` is read. Where columns are wanted, whole rows are read, at most `most` elements at once, or
    one row.
    """
    ranks = (copy,) if saved.split is None else saved.split.axis.ranks
    parts = [
        (saved_rank, there, _from_row(first_row, had))
        for saved_rank in ranks
        for there, had in saved.parts(saved_rank)
    ]
    for block in piece.blocks(rank):
        room = target[within(block.elements, piece.elements)].view(block.shape)
        for (here, wanted), (saved_rank, there, had) in product(block.parts, parts):
            common = tuple(
                slice(max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(wanted, had, strict=True)
            )
            if all(side.start < side.stop for side in common):
                box = _moved(common, had, there)
                _fill(room[_moved(common, wanted, here)], box, saved, partial(read_into, saved_rank), most)


def _from_row(first: int, box: Box) -> Box:
    """A box of an array whose rows are those of a larger one from `first` on, in that."""
    return (slice(box[0].start + first, box[0].stop + first), *box[1:]) if box else box


def _moved(part: Box, whole: Box, to: Box) -> Box:
    """A part of the box `whole`, where that is the box `to`."""
    moves = [there.start - here.start for here, there in zip(whole, to, strict=True)]
    return tuple(slice(side.start + move, side.stop + move) for side, move in zip(part, moves, strict=True))


def _fill(
    target: Tensor, box: Box, saved: Placement, read_into: Callable[[int, Tensor], None], most: int
) -> None:
    """Fill `target` with a box of an array, which is read in whole rows unless the box is contiguous."""
    target, box, shape, first = target[None], (slice(0, 1), *box), (1, *saved.local_shape), 0
    while len(box) > 1 and len(target) == 1:
        target, box, shape, first = target[0], box[1:], shape[1:], (first + box[0].start) * shape[1]
    row = math.prod(shape[1:])
    if target.is_contiguous() and target[0].numel() == row:
        read_into((first + box[0].start) * row, target.view(-1))
        return
    step = max(1, most // row)
    for start in range(box[0].start, box[0].stop, step):
        rows = target[start - box[0].start :][:step]
        read = torch.empty((len(rows), *shape[1:]), dtype=target.dtype)
        read_into((first + start) * row, read.view(-1))
        rows.copy_(read[(slice(None), *box[1:])])
