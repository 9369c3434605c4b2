"""The plan of every rank of a grid, made by one process; ZeRO++ flags against the ranks that there are."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import SHARD_MULTIPLE
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.plan_communication import check_topology, plan_communication
from megatron_zpp.zero.reduction_plan import ReductionAlgorithm
from tests.zero.layouts import layout_of


def zero(**settings: object) -> ZeroConfig:
    return ZeroConfig(zero_stage=3, **settings)


@pytest.mark.parametrize(
    ("nodes", "local", "size", "ranks"),
    [
        (1, 8, "auto", 8),
        (4, 2, "auto", 2),
        (4, 8, "2", 2),
        (2, 1, "1", 1),
    ],
)
def test_hpz_groups_divide_nodes(nodes: int, local: int, size: str, ranks: int) -> None:
    config = zero(zero_hpz_partition_size=size)
    check_topology(config, Topology(0, nodes * local, 0, local))
    assert config.hpz_ranks(local) == ranks


@pytest.mark.parametrize(
    ("nodes", "local", "size", "would_do"),
    [
        (2, 4, "3", "1, 2, 4"),  # does not divide a node
        (2, 4, "8", "1, 2, 4"),  # whole nodes
        (1, 1, "2", "1"),
    ],
)
def test_other_hpz_sizes_are_refused_with_the_valid_ones(
    nodes: int, local: int, size: str, would_do: str
) -> None:
    with pytest.raises(ValueError, match=f"--zero-hpz-partition-size {size}: .*; give {would_do} or auto$"):
        check_topology(zero(zero_hpz_partition_size=size), Topology(0, nodes * local, 0, local))


def test_the_head_of_a_log_says_what_is_on() -> None:
    everything = zero(
        zero_quantized_weights=True,
        zero_hpz_partition_size="auto",
        zero_quantized_gradients=True,
        zero_quantized_gradients_format="rotated4",
    )
    assert everything.describe() == "ZeRO stage 3 + qwZ int8 + hpZ auto + qgZ rotated4"
    assert zero().describe() == zero().describe(1) == "ZeRO stage 3"
    alone = "ZeRO stage 3 + qgZ int4 (one rank: nothing to communicate)"
    assert zero(zero_quantized_gradients=True).describe(1) == alone
    assert zero(zero_quantized_gradients=True).describe(2) == "ZeRO stage 3 + qgZ int4"
    sizes = {"auto": "a node", "1": "1 rank", "4": "4 ranks"}
    for size, over in sizes.items():
        line = zero(zero_gradient_partition_size=size).describe()
        assert line == f"ZeRO stage 3 + gradients accumulated over {over}"


QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
SETTINGS: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in (0, 1, 2, 3)),
    {"zero_stage": 1} | QWZ | QGZ,
    {"zero_stage": 3, "zero_hpz_partition_size": "auto"},
    {"zero_stage": 3, "zero_hpz_partition_size": "auto"} | QWZ | QGZ,
]
GRIDS = ((1, 1), (1, 2), (1, 4), (4, 1), (2, 2), (3, 2), (2, 8), (24, 16))
SIZES = (700, 5001, 129, 5001, 5001, 1)


def plans_of(
    settings: dict[str, Any], nodes: int, local: int, sizes: Sequence[int] = SIZES, **more: Any
) -> list[CommunicationPlan]:
    """Of every rank."""
    world = nodes * local
    inputs = {"compute_dtype": torch.bfloat16, "reduce_in_bf16": False, "copy_engines": False} | more
    layouts = [layout_of(Mesh(nodes=nodes, local_ranks=local), size) for size in sizes]
    grid = (Topology(rank, world, rank % local, local) for rank in range(world))
    return [plan_communication(ZeroConfig(**settings), each, layouts, **inputs) for each in grid]


def test_ranks_of_a_stream_agree_on_it() -> None:
    """Every rank makes its streams in one order, each over ranks that make the same one."""
    for settings, (nodes, local) in product(SETTINGS, GRIDS):
        plans = plans_of(settings, nodes, local)
        for rank, plan in enumerate(plans):
            assert len(plan.streams) == len(plans[0].streams)
            for index, ranks in enumerate(plan.streams):
                assert rank in ranks
                assert all(plans[peer].streams[index] == ranks for peer in ranks)
            hops = (plan.gather.hop, *plan.reduction.hops, *([plan.secondary.hop] if plan.secondary else []))
            for hop in hops:
                assert all(plan.streams[stream] == hop.ranks for stream in hop.streams)
                several_nodes = len({plan.grid.node_of(each) for each in hop.ranks}) > 1
                assert several_nodes or len(hop.streams) == 1
                assert hop.ranks[hop.group_rank] == rank


def test_all_nodes_have_the_same_plan() -> None:
    """So that --dry-run, which asks the ranks of one node, knows what all nodes send and hold."""
    for settings, (nodes, local) in product(SETTINGS, GRIDS):
        plans = plans_of(settings, nodes, local)
        for rank, plan in enumerate(plans):
            other = plans[rank % local]
            for layout in plan.layouts:
                assert plan.gather.bytes_sent(layout) == other.gather.bytes_sent(layout)
                assert plan.reduction.bytes_sent(layout, 2) == other.reduction.bytes_sent(layout, 2)
            assert plan.arena_bytes == other.arena_bytes == plans[0].arena_bytes
            assert plan.weight_bytes == plans[0].weight_bytes


def test_algorithms_of_the_grids() -> None:
    inside = {(1, 2): ReductionAlgorithm.LOCAL_SUM, (1, 4): ReductionAlgorithm.TWO_STEP}
    for nodes, local in GRIDS:
        whole, sharded = (
            plans_of({"zero_stage": stage}, nodes, local)[0].reduction.algorithm for stage in (0, 2)
        )
        assert whole is inside.get((nodes, local), ReductionAlgorithm.LIBRARY)
        two_hops = nodes > 1 and local > 1
        assert sharded is (ReductionAlgorithm.TWO_HOPS if two_hops else ReductionAlgorithm.ONE_HOP)


def test_peer_writes_are_only_used_inside_one_node() -> None:
    for settings, (nodes, local) in product(SETTINGS, GRIDS):
        plan = plans_of(settings, nodes, local, copy_engines=True)[-1]
        algorithm = plan.reduction.algorithm
        expected = nodes == 1 < local and algorithm is not ReductionAlgorithm.QUANTIZED_ONE_HOP
        assert plan.reduction.peer_writes == expected
        assert plan.with_peer_writes(False).with_peer_writes(True) == plan
        without = plan.with_peer_writes(False).reduction.buffers
        saved = expected and algorithm is not ReductionAlgorithm.TWO_STEP  # which gathers sums there
        assert without.joined.nbytes - plan.reduction.buffers.joined.nbytes == (
            saved and without.joined.nbytes
        )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_weights_that_the_optimizer_has_whole_are_not_gathered(nodes: int, local: int, stage: int) -> None:
    """At stage 0, and at stages 1 and 2 of one rank."""
    plan = plans_of({"zero_stage": stage}, nodes, local)[0]
    assert plan.gathers_in_place == (stage == 0 or (stage < 3 and nodes * local == 1))


def test_signs_can_begin_where_every_chunk_begins() -> None:
    """Their numbers must be multiples of 128. A chunk may be an odd part of a shard."""
    settings = QGZ | {"zero_stage": 2, "zero_quantized_gradients_format": "rotated4"}
    chunks = 0
    for nodes, local in ((2, 2), (3, 2), (2, 4)):
        world = nodes * local
        shards = [
            -(-numel // SHARD_MULTIPLE) * SHARD_MULTIPLE for numel in (1, 4_210_688, 4_210_944, 5_000_000)
        ]
        for plan in plans_of(settings, nodes, local, sizes=[world * shard for shard in shards]):
            reduction = plan.reduction
            for layout in plan.layouts:
                for chunk in reduction.chunks(layout.shard_numel):
                    first = reduction.first_element(layout.shard_numel, chunk)
                    assert {(first + node * len(chunk)) % 128 for node in range(nodes)} == {0}
                    chunks += layout.shard_numel > len(chunk)
    assert chunks > 0
