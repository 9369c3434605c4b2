"""qgZ's reduction on its own: sums over every grid of nodes × ranks."""

import dataclasses
from unittest.mock import patch

import numpy
import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.distributed.traffic import TrafficLedger
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.placement import Layout
from megatron_zpp.zero import reduction_plan
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.communication import build_reduction
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.plan_communication import plan_communication
from megatron_zpp.zero.reduction_plan import ReductionPlan
from tests.support import nightly
from tests.zero.layouts import layout_of
from tests.zero.quantizing import copy_engines, operations, this_device
from tests.zero.ranks import on_ranks


@dataclasses.dataclass(frozen=True)
class Reduced:
    """One reduction; `same` gradients on all ranks are whole codes of scale 1, and so are sums of them."""

    codes: str
    shard_numel: int
    chunk: int
    dtype: torch.dtype
    same: bool = False

    @property
    def format(self) -> QuantFormat:
        return QuantFormat(self.codes, 128)


REDUCED = (
    Reduced("int4", 256, 2**18, torch.bfloat16),
    Reduced("int4", 5 * 256, 256, torch.float32),
    Reduced("int8", 3 * 256, 512, torch.float16),
    Reduced("int4", 512, 128, torch.bfloat16, same=True),
)


def plan_of(topology: Topology, quant_format: QuantFormat, layout: Layout) -> ReductionPlan:
    """The plan of a reduction of fp32 gradients in this format."""
    plan = plan_communication(
        ZeroConfig(zero_stage=2, zero_quantized_gradients=True),
        topology,
        [layout],
        compute_dtype=torch.float32,
        reduce_in_bf16=False,
        copy_engines=copy_engines(topology),
    ).reduction
    first = plan.hops[0].stream  # after those of the gathers
    hops = (
        dataclasses.replace(hop, streams=tuple(one - first for one in hop.streams), format=quant_format)
        for hop in plan.hops
    )
    return dataclasses.replace(plan, hops=tuple(hops))


def streams_of(plan: ReductionPlan, topology: Topology, ledger: TrafficLedger) -> list[CommStream]:
    """The communication streams of the hops."""
    uses_copy_engines = copy_engines(topology)
    return [
        CommStream(hop.ranks, topology, this_device(), ledger, None, copy_engines=uses_copy_engines)
        for hop in plan.hops
        for _ in hop.streams
    ]


def reduce(topology: Topology) -> list[tuple[numpy.ndarray, numpy.ndarray]]:
    """(this rank's gradients (world, shard), its shard of the reduced ones) of each of REDUCED."""
    results = []
    for case in REDUCED:
        with patch.object(reduction_plan, "SMALLEST_CHUNK", case.chunk):
            results.append(reduce_one(topology, case))
    return results


def reduce_one(topology: Topology, case: Reduced) -> tuple[numpy.ndarray, numpy.ndarray]:
    layout = layout_of(topology.mesh, topology.world_size * case.shard_numel)
    assert layout.shard_numel == case.shard_numel
    plan, ledger = plan_of(topology, case.format, layout), TrafficLedger(topology)
    comm_streams = streams_of(plan, topology, ledger)
    reduction = build_reduction(plan, comm_streams, operations())
    for comm_stream in comm_streams:
        comm_stream.ready()
    generator = torch.Generator().manual_seed(1 if case.same else topology.rank)
    if case.same:
        full = torch.randint(-8, 8, (layout.numel,), generator=generator).to(case.dtype)
        full[:: case.format.block] = -8
    else:
        full = torch.randn(layout.numel, generator=generator).to(case.dtype)
        full[::97] *= 30
    shard = torch.full((case.shard_numel,), 7.0, device=this_device())
    parts = [
        GradSegment(start, full[start : start + 512].to(this_device())) for start in range(0, len(full), 512)
    ]
    reduction.reduce(parts, Target(shard, add=True)).wait()
    for comm_stream in comm_streams:
        comm_stream.settle()
    sent = plan.bytes_sent(layout, 1)
    assert ledger.take() == (sent.intra, sent.inter)
    for comm_stream in comm_streams:
        comm_stream.close()
    return full.float().view(topology.world_size, -1).numpy(), (shard - 7.0).cpu().numpy()


def check_reduced(nodes: int, local: int, ranks: list[list[tuple[numpy.ndarray, numpy.ndarray]]]) -> None:
    """A code is off by half a step, one where the other end of the range is clipped: peak / 8 for int4.

    Each rank's message adds its own error, and between nodes each sum's message another one. Gradients that
    codes hold exactly come out exactly, as many times as there are ranks.
    """
    world = nodes * local
    for case, *results in zip(REDUCED, *ranks, strict=True):
        gradients = torch.from_numpy(numpy.stack([full for full, _ in results]))  # (from, to, shard)
        grid = Topology(0, world, 0, local)
        owned = [results[grid.owner_of(shard)][1] for shard in range(world)]
        shards = torch.from_numpy(numpy.stack(owned))
        if case.same:
            assert torch.equal(shards, gradients[0] * world)
            continue
        steps = 2 ** (case.format.bits - 1)
        blocks = gradients.view(nodes, local, world, -1, 128)
        error = blocks.abs().amax(-1).sum((0, 1)) / steps  # (to, blocks)
        if nodes > 1 and local > 1:
            lost_inside = blocks.abs().amax(-1).sum(1) / steps
            error = error + ((blocks.sum(1).abs().amax(-1) + lost_inside) / steps).sum(0)
        off = (shards - gradients.sum(0)).view(world, -1, 128).abs()
        assert (off <= error[..., None] + 1e-4).all(), case
        assert off.max() > 0, case  # it was quantised


@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (2, 1), (2, 2), (3, 2), nightly(2, 3), nightly(4, 1)])
def test_a_reduction_is_the_sum_over_all_ranks_within_its_formats_error(nodes: int, local: int) -> None:
    check_reduced(nodes, local, on_ranks(nodes * local, reduce, ranks_per_node=local))
