"""qgZ with several chunks per shard, as all but tiny models have: groups that accumulate, rotated codes."""

from unittest.mock import patch

import numpy
import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.distributed.traffic import TrafficLedger
from megatron_zpp.ops.signs import Signs
from megatron_zpp.zero import reduction_plan
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.collectives.rotation import Rotation
from megatron_zpp.zero.communication import build_reduction
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.hop import SentBytes
from megatron_zpp.zero.plan_communication import plan_communication
from megatron_zpp.zero.reduction_plan import ReductionPlan
from tests.zero.layouts import layout_of
from tests.zero.quantizing import copy_engines, operations, this_device
from tests.zero.ranks import on_ranks

SHARD, MICRO_BATCHES = 5 * 256, 2
GAPS = (slice(300, 310), slice(SHARD - 4, SHARD))  # the last chunk has one
FORMATS = ("int4", "rotated4")


def gradient(format: str, rank: int, world: int) -> torch.Tensor:
    """What codes inside nodes hold exactly, and those of int4, the same on all ranks, also between nodes."""
    generator = torch.Generator().manual_seed(rank if format == "rotated4" else 1)
    end = 128 if format == "rotated4" else 8
    full = torch.randint(-end, end, (world * SHARD,), generator=generator).float()
    full[::128] = -end  # the first of a block, whose scale is then 1
    return full


def reduced(topology: Topology, group: str) -> list[numpy.ndarray]:
    """This rank's shard of the sums in each of FORMATS; `group` is --zero-gradient-partition-size."""
    rank, world = topology.rank, topology.world_size
    return [reduced_in(topology, group, format, gradient(format, rank, world)) for format in FORMATS]


def reduced_of_equal_chunks(topology: Topology, group: str) -> numpy.ndarray:
    """This rank's shard of the sum of gradients whose chunks are all equal."""
    chunk = torch.randn(256, generator=torch.Generator().manual_seed(3))
    return reduced_in(topology, group, "rotated4", chunk.repeat(topology.world_size * SHARD // 256))


@patch.object(reduction_plan, "SMALLEST_CHUNK", 256)
def reduced_in(topology: Topology, group: str, format: str, full: torch.Tensor) -> numpy.ndarray:
    layout = layout_of(topology.mesh, topology.world_size * SHARD)
    zero = ZeroConfig(
        zero_stage=2,
        zero_quantized_gradients=True,
        zero_quantized_gradients_format=format,
        zero_gradient_partition_size=group,
    )
    plan = plan_communication(
        zero,
        topology,
        [layout],
        compute_dtype=torch.float32,
        reduce_in_bf16=False,
        copy_engines=copy_engines(topology),
    ).reduction
    assert len([*plan.chunks(SHARD)]) > 2 or topology.local_world_size == 1
    ledger = TrafficLedger(topology)
    comm_streams = streams_of(plan, topology, ledger)
    sent = [GradSegment(0, full[:1000].to(this_device())), GradSegment(1000, full[1000:].to(this_device()))]
    total = torch.full((SHARD,), 7.0, device=this_device())
    rotation = Rotation(Signs(11, 0, 0), GAPS) if format == "rotated4" else None
    reduction = build_reduction(plan, comm_streams, operations())
    if group == "off":
        for index in range(MICRO_BATCHES):
            reduction.reduce(sent, Target(total, index > 0, rotation=rotation)).wait()
    else:
        accumulated = torch.full((plan.accumulator_numel(layout),), 7.0, device=this_device())
        for index in range(MICRO_BATCHES):
            reduction.accumulate(sent, accumulated, add=index > 0).wait()
        reduction.reduce_accumulated(accumulated, Target(total, rotation=rotation)).wait()
    expected = SentBytes()
    for index in range(MICRO_BATCHES):
        expected += plan.bytes_sent(layout, MICRO_BATCHES, last=index == MICRO_BATCHES - 1)
    for comm_stream in comm_streams.values():
        comm_stream.settle()
        comm_stream.close()
    assert ledger.take() == (expected.intra, expected.inter)
    return total.cpu().numpy()


def streams_of(plan: ReductionPlan, topology: Topology, ledger: TrafficLedger) -> dict[int, CommStream]:
    """The streams of the hops and of the fold by their numbers in the plan."""
    found, engines = {}, copy_engines(topology)
    for hop in (*plan.hops, *([plan.fold] if plan.fold else [])):
        for stream in hop.streams:
            found[stream] = CommStream(hop.ranks, topology, this_device(), ledger, None, copy_engines=engines)
    for comm_stream in found.values():
        comm_stream.ready()
    return found


@pytest.mark.parametrize(
    ("nodes", "local", "group"), [(2, 1, "off"), (2, 2, "off"), (2, 2, "auto"), (3, 2, "auto"), (2, 4, "2")]
)
def test_every_chunk_is_summed(nodes: int, local: int, group: str) -> None:
    """Exactly, or within what codes lose.

    4 bits of normal numbers lose 0.0095 of their squares (Max, 1960, table I), one block up to twice that.
    Nodes of one rank have no chunks, but gaps.
    """
    world = nodes * local
    ranks = on_ranks(world, reduced, group, ranks_per_node=local)
    grid = Topology(0, world, 0, local)
    for place, format in enumerate(FORMATS):
        sums = sum(gradient(format, rank, world) for rank in range(world)) * MICRO_BATCHES
        for shard, exact in enumerate(sums.view(world, SHARD)):
            found = torch.from_numpy(ranks[grid.owner_of(shard)][place])
            if format == "int4":
                assert torch.equal(found, exact)
                continue
            for gap in GAPS:
                assert not found[gap.start : gap.stop].any()
                exact[gap.start : gap.stop] = 0
            for off, true in zip((found - exact).split(256), exact.split(256), strict=True):
                assert 0 < off.square().sum() < 2 * 0.0095 * true.square().sum()


@pytest.mark.parametrize("group", ["off", "auto"])
def test_each_chunk_of_each_shard_has_signs_of_its_own(group: str) -> None:
    """Signs that repeat round equal chunks equally, and errors add up. No compared part has a gap."""
    shards = on_ranks(4, reduced_of_equal_chunks, group, ranks_per_node=2)
    parts = {chunk[64:192].tobytes() for shard in shards for chunk in shard.reshape(-1, 256)}
    assert len(parts) == 4 * SHARD // 256
