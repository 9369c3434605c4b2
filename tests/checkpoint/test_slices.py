"""A part of a parameter, assembled from the parts of other tensor ranks, against the cut of the whole."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.slices import Block, Part, Sharing, blocks, fill, same_part
from megatron_zpp.distributed.split import Split

NAME = "weight"


@dataclass(frozen=True)
class Case:
    """A parameter, who saved it, and the elements of a reader's part."""

    shape: tuple[int, ...]
    saved: Sharing
    wanted: Part
    elements: range
    most: int  # elements of a read


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """T does not have to divide T', and the reader's runs may differ from the saved ones."""
    saved_ranks, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    multiple = math.lcm(saved_ranks, ranks)
    runs = tuple(multiple * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(runs)
    split = Split(dim, runs)
    whole_on = draw(st.sampled_from(["neither", "saved", "wanted"]))
    saved = Sharing({} if whole_on == "saved" else {NAME: split}, saved_ranks)
    other = Split(dim, draw(st.sampled_from([runs, runs[::-1], (sum(runs),)])))
    wanted = Part(None if whole_on == "wanted" else other, ranks, draw(st.integers(0, ranks - 1)))
    numel = math.prod(shape) // (1 if wanted.split is None else ranks)
    start = draw(st.integers(0, numel))
    elements = range(start, draw(st.integers(start, numel)))
    return Case(tuple(shape), saved, wanted, elements, draw(st.integers(1, 60)))


def part_of(whole: torch.Tensor, part: Part) -> torch.Tensor:
    cut = whole if part.split is None else part.split.part(whole, part.ranks, part.rank)
    return cut.flatten()


def blocks_of(case: Case) -> list[Block]:
    return list(blocks(case.shape, case.saved, NAME, case.wanted, case.elements, most=case.most))


@given(cases())
def test_any_part_is_assembled_from_any_others(case: Case) -> None:
    whole = torch.arange(math.prod(case.shape), dtype=torch.float32).view(case.shape)
    parts = [part_of(whole, case.saved.part(NAME, rank)) for rank in range(case.saved.ranks)]

    def read_into(rank: int, first: int, target: torch.Tensor) -> None:
        assert target.is_contiguous()
        target.copy_(parts[rank][first : first + len(target)])  # raises unless it has so many

    found = torch.full((len(case.elements),), -1.0)
    fill(found, case.elements, iter(blocks_of(case)), read_into)
    assert torch.equal(found, part_of(whole, case.wanted)[case.elements.start : case.elements.stop])


@given(cases())
def test_reads_are_few_and_bounded(case: Case) -> None:
    """At most one read of a saved rank per block of rows, of no more than `most` elements or one row."""
    found = blocks_of(case)
    split = case.wanted.split or case.saved.splits[NAME]
    if math.prod(case.shape[: split.dim]) == 1:
        assert sum(len(read.elements) for block in found for read in block.reads) == len(case.elements)
        assert len(found) <= 2 * 3 * case.saved.ranks  # three runs at most on either side
        return
    for block in found:
        ranks = [read.rank for read in block.reads]
        assert len(set(ranks)) == len(ranks)
        rows = len(block.destination) // block.width
        assert all(len(read.elements) <= case.most or rows == 1 for read in block.reads)
    wanted_rows = sum(len(block.destination) for block in found)
    assert wanted_rows < len(case.elements) + 2 * (found[0].width if found else 1)


@pytest.mark.parametrize(
    ("saved", "wanted", "rank"),
    [
        (Part(Split(0, (8,)), 2, 0), Part(Split(0, (8,)), 2, 1), 1),
        (Part(None, 2, 0), Part(None, 2, 1), 1),
        (Part(None, 4, 0), Part(None, 2, 1), 0),
        (Part(Split(0, (8,)), 1, 0), Part(None, 1, 0), 0),
        (Part(None, 1, 0), Part(None, 4, 3), 0),
        (Part(Split(0, (8,)), 4, 0), Part(Split(0, (8,)), 2, 1), None),
        (Part(Split(0, (8,)), 2, 0), Part(Split(0, (4, 4)), 2, 1), None),
        (Part(None, 1, 0), Part(Split(0, (8,)), 2, 1), None),
        (Part(Split(0, (8,)), 2, 0), Part(None, 1, 0), None),
    ],
)
def test_the_same_part_is_read_as_it_is(saved: Part, wanted: Part, rank: int | None) -> None:
    assert same_part(saved, wanted) == rank
