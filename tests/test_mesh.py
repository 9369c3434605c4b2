"""Groups of a mesh, beside slices of an array of all ranks."""

from itertools import product

import numpy as np
import pytest

from megatron_zpp.mesh import Axis, Mesh

SIZES = [(1, 1, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (2, 3, 1, 2), (3, 2, 2, 1), (2, 4, 1, 2), (2, 2, 2, 2)]
NAMES = ("node", "local", "context", "tensor")


def mesh_of(sizes: tuple[int, ...], rank: int = 0) -> Mesh:
    nodes, local, context, tensor = sizes
    return Mesh(nodes=nodes, local_ranks=local, context_ranks=context, tensor_ranks=tensor, rank=rank)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_are_slices_of_the_array_of_ranks(sizes: tuple[int, ...]) -> None:
    """For every product of two axes in both orders, and the three of shards."""
    array = np.arange(np.prod(sizes)).reshape(sizes)
    for place in np.ndindex(*sizes):
        mesh = mesh_of(sizes, array[place])
        products = [*product(NAMES, NAMES), ("local", "context", "node")]
        for names in (names for names in products if len(set(names)) == len(names)):
            at = [NAMES.index(name) for name in names]
            rest = [axis for axis in range(4) if axis not in at]
            wanted = array.transpose(*rest, *at)[tuple(place[axis] for axis in rest)].ravel()
            axes = [getattr(mesh, name) for name in names]
            assert mesh.ranks(*axes) == tuple(wanted)
            assert wanted[mesh.index(*axes)] == mesh.rank
            nodes = {np.argwhere(array == rank)[0][0] for rank in wanted}
            assert mesh.share_a_node(wanted) == (len(nodes) == 1)
        assert mesh.ranks(mesh.replicas) == mesh.ranks(mesh.local, mesh.context)
        assert mesh.ranks(*mesh.shards) == mesh.ranks(mesh.local, mesh.context, mesh.node)
        assert len(mesh.ranks(*mesh.shards)) == mesh.shard_ranks
        assert mesh.ranks(*mesh.samples)[mesh.data_rank] == mesh.rank
        assert mesh.ranks(mesh.tensor)[mesh.tensor_rank] == mesh.rank
        assert len(mesh.ranks(*mesh.samples)) == mesh.data_ranks


def test_two_nodes_of_four_ranks_that_share_layers_in_pairs() -> None:
    """By hand: rank 6 is tensor rank 0 of its pair, and data rank 3, the second of node 1."""
    mesh = Mesh(nodes=2, local_ranks=2, tensor_ranks=2, rank=6)
    assert (mesh.data_rank, mesh.data_ranks, mesh.tensor_rank) == (3, 4, 0)
    assert mesh.ranks(mesh.tensor) == (6, 7)
    assert mesh.ranks(mesh.node) == (2, 6)
    assert mesh.ranks(mesh.local) == (4, 6)
    assert mesh.ranks(*mesh.inside_node) == (4, 5, 6, 7)
    assert mesh.ranks(*mesh.samples) == (0, 2, 4, 6)
    assert mesh.ranks(*mesh.shards) == (0, 4, 2, 6)
    assert mesh.at(5).ranks(*mesh.samples) == (1, 3, 5, 7)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_shards_beside_what_is_split_are_the_ranks_with_the_same_part(sizes: tuple[int, ...]) -> None:
    """For every axis that begins at some stride: the shards of equal places, or it is refused."""
    mesh = mesh_of(sizes)
    strides = [stride for stride in range(1, mesh.world_size) if mesh.world_size % stride == 0]
    for split in (Axis(stride, size) for stride in strides for size in range(2, mesh.world_size + 1)):
        alike = [rank for rank in mesh.ranks(*mesh.shards) if split.index(rank) == 0]
        try:
            found = mesh.ranks(*mesh.shards_beside(split))
        except ValueError:
            continue
        assert sorted(found) == sorted(alike)
    for inner in (each for each in (1, 2, 4) if mesh.replicas.size % each == 0):
        for split, left in (mesh.replicas.cut(inner), mesh.replicas.cut(inner)[::-1]):
            assert [axis.size for axis in mesh.shards_beside(split)] == [left.size, mesh.nodes]
    whole = Axis(mesh.replicas.stride, mesh.shard_ranks)
    assert [axis.size for axis in mesh.shards_beside(whole)] == [1, 1]


def test_what_is_no_mesh_and_no_part_of_an_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="a mesh of 2 × 2 × 1 × 1 ranks has no rank 4"):
        Mesh(nodes=2, local_ranks=2, rank=4)
    with pytest.raises(ValueError, match="an axis of 4 ranks has no groups of 3"):
        Axis(1, 4).cut(3)
