"""A part of a parameter, assembled from the parts of other tensor ranks, against the cut of the whole.

test_versions.py has tables that were saved in blocks of rows.
"""

import math
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.slices import fill
from megatron_zpp.mesh import Axis
from megatron_zpp.placement import Piece, Placement, Split


@dataclass(frozen=True)
class Case:
    """A parameter as it was saved, and the piece of a reader's part."""

    saved: Placement
    piece: Piece
    rank: int
    most: int  # elements of a read


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """T does not have to divide T', and the reader may split other runs, or another dimension."""
    saved_ranks, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    multiple = math.lcm(saved_ranks, ranks)
    runs = tuple(multiple * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = draw(st.lists(st.integers(1, 5).map(lambda n: n * ranks), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(runs)
    saved, wanted = Split(dim, runs, Axis(1, saved_ranks)), Split(dim, runs[::-1], Axis(1, ranks))
    other = draw(st.integers(0, len(shape) - 1))
    if other != dim:
        wanted = Split(other, (shape[other],), Axis(1, ranks))
    saved_split, split = draw(
        st.sampled_from([(saved, wanted), (None, wanted), (saved, None), (saved, saved)])
    )
    placement = Placement(name="w", shape=tuple(shape), split=split)
    start = draw(st.integers(0, placement.numel))
    elements = range(start, draw(st.integers(start, placement.numel)))
    rank = draw(st.integers(0, (1 if split is None else split.axis.size) - 1))
    piece = Piece(placement, elements, elements)
    return Case(
        Placement(name="w", shape=tuple(shape), split=saved_split), piece, rank, draw(st.integers(1, 60))
    )


def part_of(whole: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    split = placement.split
    if split is None:
        return whole.flatten()
    parts = [run.chunk(split.axis.size, split.dim)[rank] for run in whole.split(split.runs, split.dim)]
    return torch.cat(parts, split.dim).flatten()


@given(cases())
def test_any_part_is_assembled_from_any_others(case: Case) -> None:
    """No read is longer than `most`, or than a row, beside those that go straight to where they belong."""
    saved, elements = case.saved, case.piece.elements
    whole = torch.arange(math.prod(saved.shape), dtype=torch.float32).view(saved.shape)
    ranks = 1 if saved.split is None else saved.split.axis.size
    parts = [part_of(whole, saved, rank) for rank in range(ranks)]
    found = torch.full((len(elements),), -1.0)
    reads = []

    def read_into(rank: int, first: int, target: torch.Tensor) -> None:
        assert target.is_contiguous()
        target.copy_(parts[rank][first : first + len(target)])  # raises unless it has so many
        if target.untyped_storage().data_ptr() != found.untyped_storage().data_ptr():
            reads.append(len(target))

    fill(found, case.piece, case.rank, saved, read_into, most=case.most)
    wanted = part_of(whole, case.piece.placement, case.rank)
    assert torch.equal(found, wanted[elements.start : elements.stop])
    assert max(reads, default=0) <= max(case.most, math.prod(saved.local_shape[1:]))


def test_copies_of_the_whole_are_read_from_one_tensor_rank() -> None:
    asked = []
    whole, elements = Placement(name="w", shape=(4, 3)), range(2, 9)
    fill(
        torch.empty(7),
        Piece(whole, elements, elements),
        1,
        whole,
        lambda *read: asked.append(read[:2]),
        copy=1,
    )
    assert asked == [(1, 2), (1, 3)]
