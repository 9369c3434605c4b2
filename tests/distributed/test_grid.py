"""Data ranks × tensor ranks of a job: arithmetic that one process can test for many ranks."""

import pytest

from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology


def grids(nodes: int, local: int, tensor: int) -> list[Grid]:
    """The grid as each rank of the job sees it."""
    return [Grid(Topology(rank, nodes * local, rank % local, local), tensor) for rank in range(nodes * local)]


@pytest.mark.parametrize(
    ("nodes", "local", "tensor"), [(1, 1, 1), (1, 4, 4), (2, 4, 1), (2, 4, 2), (3, 6, 3), (2, 8, 8)]
)
def test_each_rank_is_in_one_tensor_group_and_among_one_set_of_data_ranks(
    nodes: int, local: int, tensor: int
) -> None:
    ranks = range(nodes * local)
    for rank, grid in zip(ranks, grids(nodes, local, tensor), strict=True):
        assert grid.tensor_ranks[grid.tensor_rank] == rank
        assert {other // local for other in grid.tensor_ranks} == {rank // local}  # inside a node
        data = grid.data
        peers = data.job_ranks(range(data.world_size))
        assert grid.job.is_job
        assert data.is_job == (tensor == 1)  # what is summed over the job must not be given these
        assert peers[data.rank] == rank
        assert {other % tensor for other in peers} == {grid.tensor_rank}
        assert len(peers) * tensor == len(ranks)
        assert set(data.job_ranks(data.node_ranks)) == {
            other for other in peers if other // local == rank // local
        }


def test_two_nodes_of_four_ranks_that_share_layers_in_pairs() -> None:
    """By hand: job rank 6 is tensor rank 0 of its pair, and data rank 3, the second of node 1."""
    grid = grids(2, 4, 2)[6]
    assert (grid.tensor_rank, grid.tensor_ranks) == (0, range(6, 8))
    assert grid.data == Topology(3, 4, 1, 2, stride=2, first_job_rank=0)
    assert grid.data.job_ranks(grid.data.cross_node_ranks) == [2, 6]
    assert grids(2, 4, 2)[5].data.job_ranks(range(4)) == [1, 3, 5, 7]


def test_a_tensor_group_stays_inside_a_node() -> None:
    with pytest.raises(ValueError, match=r"size 4: must divide the 6 ranks of a node; possible: 1, 2, 3, 6$"):
        Grid(Topology(0, 12, 0, 6), 4)
