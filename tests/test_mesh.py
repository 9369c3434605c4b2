"""Groups of a mesh, beside slices of an array of all ranks, and beside Topology and Grid."""

from itertools import product

import numpy as np
import pytest

from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology
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


@pytest.mark.parametrize("sizes", [each for each in SIZES if each[2] == 1], ids=str)
def test_a_mesh_without_context_ranks_is_a_topology_of_data_ranks(sizes: tuple[int, ...]) -> None:
    nodes, local, _, tensor = sizes
    for rank in range(nodes * local * tensor):
        mesh = mesh_of(sizes, rank)
        grid = Grid(Topology(rank, mesh.world_size, rank % mesh.node_size, mesh.node_size), tensor)
        data = grid.data
        owners = [data.owner_of(shard) for shard in range(data.world_size)]
        assert mesh.ranks(mesh.tensor) == tuple(grid.tensor_ranks)
        assert mesh.ranks(*mesh.shards) == tuple(data.job_ranks(owners))
        assert owners[mesh.index(*mesh.shards)] == data.rank
        assert mesh == data.mesh
        assert mesh.ranks(*mesh.samples) == tuple(data.job_ranks(range(data.world_size)))
        assert mesh.ranks(mesh.local) == tuple(data.job_ranks(data.node_ranks))
        assert mesh.ranks(mesh.node) == tuple(data.job_ranks(data.cross_node_ranks))
        for size in (size for size in range(1, local + 1) if local % size == 0):
            groups, places = mesh.local.cut(size)
            first = data.rank // size * size
            assert mesh.ranks(places) == tuple(data.job_ranks(range(first, first + size)))
            peers = data.node_ranks[data.local_rank % size :: size]
            assert mesh.ranks(groups) == tuple(data.job_ranks(peers))


def test_what_is_no_mesh_and_no_part_of_an_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="a mesh of 2 × 2 × 1 × 1 ranks has no rank 4"):
        Mesh(nodes=2, local_ranks=2, rank=4)
    with pytest.raises(ValueError, match="an axis of 4 ranks has no groups of 3"):
        Axis(1, 4).cut(3)
