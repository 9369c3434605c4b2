"""The launcher's variables: arithmetic that one process can test for many ranks."""

import pytest

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


WRONG = "RANK=8 RANK=-1 RANK=x RANK= WORLD_SIZE=0 LOCAL_RANK=4 MASTER_PORT=0 MASTER_PORT=65536 MASTER_PORT=x"


@pytest.mark.parametrize("wrong", WRONG.split())
def test_impossible_values_are_named(wrong: str) -> None:
    name, value = wrong.split("=")
    with pytest.raises(ValueError, match=rf"{'RANK' if name == 'WORLD_SIZE' else name} "):
        Topology.from_environment({**TORCHRUN, name: value})


def test_nodes_are_counted_from_the_launcher() -> None:
    topology = Topology(5, 8, 1, 4)
    assert topology.nodes == 2
    assert [topology.mesh().node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"WORLD_SIZE 6.*LOCAL_WORLD_SIZE 4"):
        Topology(0, 6, 0, 4)


def test_tensor_and_context_groups_stay_inside_a_node() -> None:
    assert Topology(7, 12, 1, 6).mesh(3) == Mesh(nodes=2, local_ranks=2, tensor_ranks=3, rank=7)
    assert Topology(7, 24, 1, 12).mesh(3, 2) == Mesh(
        nodes=2, local_ranks=2, context_ranks=2, tensor_ranks=3, rank=7
    )
    with pytest.raises(ValueError, match=r"size 4: must divide the 6 ranks of a node; possible: 1, 2, 3, 6$"):
        Topology(0, 12, 0, 6).mesh(4)
    with pytest.raises(ValueError, match=r"context-.* 2: must divide .* node / --tensor.* 2; possible"):
        Topology(0, 12, 0, 6).mesh(2, 2)
