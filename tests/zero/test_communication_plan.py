"""ZeRO++ flags against the ranks that there are."""

import pytest

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.communication_plan import check_topology


def zero(**settings: object) -> ZeroConfig:
    return ZeroConfig(zero_stage=3, **settings)


@pytest.mark.parametrize(
    ("nodes", "local", "size", "ranks"),
    [
        (1, 8, "auto", 8),
        (4, 2, "auto", 2),
        (4, 8, "2", 2),
        (4, 8, "16", 16),
        (6, 4, "12", 12),
        (2, 1, "2", 2),
    ],
)
def test_hpz_groups_divide_nodes_or_are_whole_nodes(nodes: int, local: int, size: str, ranks: int) -> None:
    config = zero(zero_hpz_partition_size=size)
    check_topology(config, Topology(0, nodes * local, 0, local))
    assert config.hpz_ranks(local, nodes) == ranks


@pytest.mark.parametrize(
    ("nodes", "local", "size", "would_do"),
    [
        (2, 4, "3", "1, 2, 4, 8"),  # does not divide a node
        (2, 4, "6", "1, 2, 4, 8"),  # straddles two nodes unevenly
        (2, 4, "16", "1, 2, 4, 8"),  # exceeds the job
        (3, 4, "8", "1, 2, 4, 12"),  # two of three nodes
        (1, 1, "2", "1"),
    ],
)
def test_other_hpz_sizes_are_refused_with_those_that_would_do(
    nodes: int, local: int, size: str, would_do: str
) -> None:
    with pytest.raises(ValueError, match=f"--zero-hpz-partition-size {size}: .*: {would_do}$"):
        check_topology(zero(zero_hpz_partition_size=size), Topology(0, nodes * local, 0, local))


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 8), (4, 1)])
def test_error_feedback_needs_a_second_hop(nodes: int, local: int) -> None:
    config = zero(zero_quantized_gradients=True, zero_gradient_error_feedback=True)
    with pytest.raises(ValueError, match=f"--zero-gradient-error-feedback .*second hop.* {nodes} × {local}$"):
        check_topology(config, Topology(0, nodes * local, 0, local))
    check_topology(config, Topology(0, 4, 0, 2))


@pytest.mark.parametrize(
    ("rank", "node", "cross_node_ranks"), [(0, [0, 1, 2], [0, 3]), (5, [3, 4, 5], [2, 5])]
)
def test_hops_of_a_rank(rank: int, node: list[int], cross_node_ranks: list[int]) -> None:
    topology = Topology(rank, 6, rank % 3, 3)
    assert list(topology.node_ranks) == node
    assert list(topology.cross_node_ranks) == cross_node_ranks
    assert list(topology.neighbours(2)) == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_the_head_of_a_log_says_what_is_on() -> None:
    everything = zero(
        zero_quantized_weights=True,
        zero_hpz_partition_size="auto",
        zero_quantized_gradients=True,
        zero_gradient_error_feedback=True,
    )
    assert everything.describe() == "ZeRO stage 3 + qwZ int8 + hpZ auto + qgZ int4 with error feedback"
    assert zero().describe() == "ZeRO stage 3"
