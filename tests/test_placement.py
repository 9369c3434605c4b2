"""Pieces of units, beside arrays that are cut by numpy; what padding costs, and units held as codes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import ALIGNMENT, SHARD_MULTIPLE, Layout, Placement, Split
from tests.zero.engines import layout_of

MESHES = [
    Mesh(),
    Mesh(local_ranks=3),
    Mesh(nodes=2, local_ranks=2, tensor_ranks=2),
    Mesh(nodes=3, local_ranks=2, context_ranks=2),
    Mesh(nodes=2, local_ranks=2, context_ranks=2, tensor_ranks=4),
]


def placements_of(tensor: Axis, *, coded: bool = False) -> tuple[Placement, ...]:
    """Every kind, with sizes that divide nothing; runs inside rows too, which no model of ours has."""
    return (
        Placement(name="qkv", shape=(36, 10), split=Split(0, (12, 16, 8), tensor), coded=coded),
        Placement(name="out", shape=(7, 12), split=Split(1, (12,), tensor), coded=coded),
        Placement(name="gate", shape=(5, 3, 8), split=Split(2, (4, 4), tensor), coded=coded),
        Placement(name="bias", shape=(13,), decays=False),
        Placement(name="scalar", shape=(), decays=False),
        Placement(name="none", shape=(0, 4)),
    )


def part_of(whole: np.ndarray, placement: Placement, rank: int) -> np.ndarray:
    """A rank's part of an array, cut by numpy."""
    if placement.split is None:
        return whole
    dim, size = placement.split.dim, placement.split.axis.size
    runs = np.split(whole, np.cumsum(placement.split.runs)[:-1], axis=dim)
    return np.concatenate(
        [np.split(run, size, axis=dim)[placement.split.axis.index(rank)] for run in runs], dim
    )


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "×".join(map(str, mesh.sizes)))
def test_blocks_of_all_shards_are_the_parts_of_the_parameters(mesh: Mesh) -> None:
    """Each shard is filled from whole parameters, block by block; together they are every rank's part."""
    layout = Layout(placements=placements_of(mesh.tensor), axes=mesh.shards, multiple=8, alignment=4)
    whole = {each.name: np.random.default_rng(0).random(each.shape) for each in layout.placements}
    for rank in range(mesh.world_size):
        group = [mesh.at(other) for other in mesh.at(rank).ranks(*mesh.shards)]
        buffer = np.full(layout.numel, np.nan)
        for member in group:
            for piece in layout.pieces(member):
                target = buffer[piece.at.start : piece.at.stop]
                for block in piece.blocks(rank):
                    first = block.elements.start - piece.elements.start
                    view = target[first : first + len(block.elements)].reshape(block.shape)
                    for inside, there in block.parts:
                        view[inside] = whole[piece.placement.name][there]
        for placement, offset in zip(layout.placements, layout.offsets, strict=True):
            wanted = part_of(whole[placement.name], placement, rank)
            assert wanted.shape == placement.local_shape
            assert np.array_equal(buffer[offset : offset + wanted.size], wanted.ravel())
        numbers = np.arange(layout.numel)
        gaps = np.concatenate([numbers[:0], *(numbers[gap] for gap in layout.gaps_in(range(layout.numel)))])
        assert np.array_equal(np.flatnonzero(np.isnan(buffer)), gaps)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "×".join(map(str, mesh.sizes)))
def test_a_unit_that_is_cut_over_some_axes_is_what_the_ranks_of_the_others_have_together(mesh: Mesh) -> None:
    layout = Layout(placements=placements_of(mesh.tensor), axes=mesh.shards, multiple=8, alignment=4)
    for rank in range(mesh.world_size):
        here = mesh.at(rank)
        for over in ((), (mesh.node,), (mesh.replicas,), mesh.shards):
            others = [axis for axis in mesh.shards if axis not in over]
            shards = [layout.ranges(here.at(other)) for other in here.ranks(*others)]
            together = sorted(element for (shard,) in shards for element in shard)
            assert [element for found in layout.ranges(here, over) for element in found] == together
        assert len(layout.ranges(here, (mesh.replicas,))) == 1  # what nodes exchange is contiguous
        assert layout.ranges(here, ()) == [range(layout.numel)]


def test_a_piece_has_few_blocks() -> None:
    """At most 2 · dimensions − 1 without runs inside rows; every start and stop of a small array."""
    placement = Placement(name="w", shape=(3, 4, 5))
    layout = Layout(placements=(placement,), axes=(), multiple=1, alignment=1)
    numbers = np.arange(math.prod(placement.shape)).reshape(placement.shape)
    for start in range(60):
        for stop in range(start + 1, 61):
            (piece,) = layout.pieces_in(range(start, stop))
            blocks = list(piece.blocks(0))
            assert len(blocks) <= 5
            found = [numbers[there].ravel() for block in blocks for _, there in block.parts]
            assert np.array_equal(np.concatenate(found), np.arange(start, stop))


coded = st.lists(st.integers(1, 60).map(lambda number: 256 * number), min_size=1, max_size=6)
wides = st.lists(st.integers(0, 5000), max_size=6)
meshes = st.integers(1, 17).map(lambda ranks: Mesh(nodes=ranks))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), meshes)
def test_padding_is_small(numels: list[int], mesh: Mesh) -> None:
    layout = layout_of(mesh, *numels)
    assert layout.shard_numel % SHARD_MULTIPLE == 0
    assert layout.numel < sum(numels) + ALIGNMENT * len(numels) + SHARD_MULTIPLE * mesh.world_size


@given(coded, wides, meshes, st.sampled_from((256, 512)))
def test_a_coded_unit_is_gathered_as_bytes(codes: list[int], wide: list[int], mesh: Mesh, block: int) -> None:
    """What every rank writes of its shard, one after the other, is each parameter in its own format."""
    layout = layout_of(mesh, *codes, *wide, coded=len(codes), alignment=block)
    assert all(start % block == 0 for start in layout.offsets)
    first = layout.wide.start
    gathered = torch.full((layout.numel, 2), -1)  # by byte: parameter and byte of it
    for rank in range(mesh.world_size):
        owned = layout.shard(mesh.at(rank))
        for piece in layout.pieces_in(owned):
            numbers, at = torch.tensor(piece.elements), piece.at.start
            if not piece.placement.coded:
                assert layout.wide.start in owned
                assert piece.at.stop <= layout.wide.stop
                numbers = torch.stack((2 * numbers, 2 * numbers + 1), 1).flatten()
                at = first + 2 * (at - first)
            assert at in owned  # so that this rank sends them
            assert at + len(numbers) <= owned.stop
            gathered[at : at + len(numbers), 0] = int(piece.placement.name)
            gathered[at : at + len(numbers), 1] = numbers
    for parameter, (placement, start) in enumerate(zip(layout.placements, layout.offsets, strict=True)):
        size = 1 if placement.coded else 2
        start = start if placement.coded else first + 2 * (start - first)
        found = gathered[start : start + size * placement.numel]
        assert (found[:, 0] == parameter).all()
        assert torch.equal(found[:, 1], torch.arange(size * placement.numel))
    codes_numel, wide_numel = (sum(-(-n // block) * block for n in numels) for numels in (codes, wide))
    least = max(codes_numel + 2 * wide_numel, 2 * wide_numel * mesh.world_size)
    assert layout.numel < least + block * mesh.world_size
