"""Pieces of units, beside arrays that are cut by numpy."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import Layout, Placement, Split

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
        Placement(name="rows", shape=(41, 3), rows=range(11, 30)),
        Placement(name="bias", shape=(13,), decays=False),
        Placement(name="scalar", shape=(), decays=False),
        Placement(name="none", shape=(0, 4)),
    )


def part_of(whole: np.ndarray, placement: Placement, rank: int) -> np.ndarray:
    """A rank's part of an array, cut by numpy."""
    if placement.rows is not None:
        whole = whole[placement.rows.start : placement.rows.stop]
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
        gaps = [at for gap in layout.gaps_in(range(layout.numel)) for at in gap]
        assert np.array_equal(np.flatnonzero(np.isnan(buffer)), gaps)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "×".join(map(str, mesh.sizes)))
def test_a_unit_that_is_cut_over_some_axes_is_what_the_ranks_of_the_others_have_together(mesh: Mesh) -> None:
    layout = Layout(placements=placements_of(mesh.tensor), axes=mesh.shards, multiple=8, alignment=4)
    for rank in range(mesh.world_size):
        here = mesh.at(rank)
        for over in ((), (mesh.node,), (mesh.local,), (mesh.local, mesh.context), mesh.shards):
            others = [axis for axis in mesh.shards if axis not in over]
            shards = [layout.ranges(here.at(other)) for other in here.ranks(*others)]
            together = sorted(element for (shard,) in shards for element in shard)
            assert [element for found in layout.ranges(here, over) for element in found] == together
        assert len(layout.ranges(here, (mesh.local, mesh.context))) == 1  # what nodes exchange is contiguous
        assert layout.ranges(here, ()) == [range(layout.numel)]


def elements_of(ranges: Sequence[range]) -> list[int]:
    return [element for each in ranges for element in each]


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
