"""Reductions of gradients as they are, in one hop or two: their bits, their error and their bytes."""

import dataclasses
from typing import NamedTuple

import numpy
import pytest
import torch

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.distributed.traffic import TrafficLedger
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import Layout
from megatron_zpp.zero.collectives.interface import Target
from megatron_zpp.zero.collectives.sums import sum_squares
from megatron_zpp.zero.communication import build_communication, build_reduction
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.hop import SentBytes
from megatron_zpp.zero.plan_communication import plan_communication
from megatron_zpp.zero.reduction_plan import ReductionAlgorithm, ReductionPlan
from tests.support import nightly
from tests.zero.layouts import layout_of
from tests.zero.quantizing import copy_engines, operations, this_device
from tests.zero.ranks import on_ranks
from tests.zero.shared_memory import SharedMemoryStream


@dataclasses.dataclass(frozen=True)
class Case:
    """Gradients as a stage and a number format send them, summed by kernels or by torch."""

    stage: int
    format: str
    in_bf16: bool = False
    kernels: bool = False
    peer_buffers: bool = False  # ranks of one node write each other's memory; GPUs do wherever they can

    @property
    def precision(self) -> PrecisionConfig:
        return PrecisionConfig(**{self.format: True}, grad_reduce_in_bf16=self.in_bf16)

    @property
    def compute(self) -> torch.dtype:
        return getattr(torch, self.precision.compute_dtype("cpu"))

    @property
    def sent(self) -> torch.dtype:
        if self.in_bf16:
            return torch.bfloat16
        return self.compute if self.stage >= 2 else torch.float32

    def plan(self, topology: Topology) -> CommunicationPlan:
        return plan_communication(
            ZeroConfig(zero_stage=self.stage),
            topology,
            layouts(topology.world_size),
            compute_dtype=self.compute,
            reduce_in_bf16=self.in_bf16,
            copy_engines=copy_engines(topology),
        )


CASES = (
    Case(1, "fp32"),
    Case(1, "bf16", kernels=True),
    Case(3, "bf16", kernels=True),
    Case(2, "fp16"),
    Case(2, "bf16", in_bf16=True, kernels=True),
    Case(3, "fp16", in_bf16=True),
    Case(1, "fp32", peer_buffers=True),
    Case(3, "bf16", kernels=True, peer_buffers=True),
)
SIZES = (700, 5001, 129, 5001, 1)  # parameters of units; nothing divides
POISONED = 1  # the unit of which the last rank has a NaN in the last round
ROUNDS = 3  # the first one overwrites, the others add


def layouts(world: int) -> list[Layout]:
    return [layout_of(Mesh(nodes=world), size) for size in SIZES]


def gradients(rank: int, index: int, layout: Layout, dtype: torch.dtype, turn: int) -> torch.Tensor:
    """Of one rank."""
    seed = 1000 * turn + 10 * rank + index
    full = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    full[::97] *= 30
    if turn == ROUNDS - 1 and index == POISONED and rank == layout.shards - 1:
        full[3] = float("nan")
    return full


Result = tuple[list[list[numpy.ndarray]], tuple[int, int]]


def reduce(started: Topology, grids: list[tuple[int, int]]) -> list[list[Result]]:
    """(this rank's shards of all units after each round, bytes sent) by grid and case."""
    rank, world = started.rank, started.world_size
    grid_topologies = [Topology(rank, world, rank % local, local) for _, local in grids]
    return [[reduce_case(topology, case) for case in CASES] for topology in grid_topologies]


def reduce_case(topology: Topology, case: Case) -> Result:
    """All units of a round are submitted before the first is waited for, as by a fast backward."""
    ledger, units = TrafficLedger(topology), layouts(topology.world_size)
    writes = case.peer_buffers and topology.nodes == 1 < topology.world_size
    make_comm_stream = SharedMemoryStream if writes and this_device().type == "cpu" else CommStream
    communication = build_communication(
        case.plan(topology),
        lambda ranks: make_comm_stream(
            ranks, topology, this_device(), ledger, None, copy_engines=copy_engines(topology)
        ),
        operations() if case.kernels else None,
    )
    sent = [torch.empty(layout.numel, dtype=case.sent, device=this_device()) for layout in units]
    for comm_stream in communication.comm_streams:
        comm_stream.ready()
    shards = [torch.full((layout.shard_numel,), 7.0, device=this_device()) for layout in units]
    squares = [torch.full((layout.shard_numel // 256,), 7.0, device=this_device()) for layout in units]
    rounds = []
    for turn in range(ROUNDS):
        for index, (layout, flat) in enumerate(zip(units, sent, strict=True)):
            flat.copy_(gradients(topology.rank, index, layout, case.sent, turn))
        parts = [in_parts(flat) for flat in sent]  # there until they are waited for
        reduced = [
            communication.reduction.reduce(gradient, Target(shard, turn > 0, found))
            for gradient, shard, found in zip(parts, shards, squares, strict=True)
        ]
        for one in reduced:
            one.wait()
        for shard, found in zip(shards, squares, strict=True):
            expected = torch.empty_like(found)
            sum_squares(operations() if case.kernels else None, shard, expected)
            any_order = 0 if case.kernels else 2 * 256 * 2**-24  # torch's depends on how many sums there are
            torch.testing.assert_close(found, expected, rtol=any_order, atol=0, equal_nan=True)
        rounds.append([shard.cpu().numpy().copy() for shard in shards])
    for comm_stream in communication.comm_streams:
        comm_stream.settle()
        comm_stream.close()
    return rounds, ledger.take()


def in_parts(flat: torch.Tensor) -> list[GradSegment]:
    """A gradient in pieces of 1 to 3 blocks that lie elsewhere."""
    starts = sorted(start for first in (0, 256, 768) for start in range(first, len(flat), 6 * 256))
    stops = [*starts[1:], len(flat)]
    return [GradSegment(start, flat[start:stop].clone()) for start, stop in zip(starts, stops, strict=True)]


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over dimension 0, one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def check_reduced(nodes: int, local: int, ranks: list[list[Result]]) -> None:
    """Every unit of every case, and the bytes of each rank to either link."""
    world = nodes * local
    for case, *results in zip(CASES, *ranks, strict=True):
        for index in range(len(SIZES)):
            shards = [[rounds[turn][index] for rounds, _ in results] for turn in range(ROUNDS)]
            grid = Topology(0, world, 0, local)
            owners = [grid.owner_of(shard) for shard in range(world)]
            whole = [numpy.concatenate([of_ranks[rank] for rank in owners]) for of_ranks in shards]
            check_unit(case, nodes, local, index, [torch.from_numpy(flat) for flat in whole])
        elements = ROUNDS * sum(layout.shard_numel for layout in layouts(world))
        expected = tuple(elements * each for each in fewest_bytes(case, nodes, local))
        assert [sent for _, sent in results] == [expected] * world, (case, nodes, local)


def check_unit(case: Case, nodes: int, local: int, index: int, after: list[torch.Tensor]) -> None:
    """Round by round: the bits of the first, the error of two, what a NaN reaches.

    A sum of two numbers is off by 2^-24 of itself, and there are at most as many sums a round as ranks; what
    is sent between nodes in bf16 is off by 2^-8 more.
    """
    world, layout = nodes * local, layouts(nodes * local)[index]
    sent = torch.stack(
        [
            torch.stack([gradients(rank, index, layout, case.sent, turn) for rank in range(world)])
            for turn in range(2)
        ]
    ).float()  # (round, from, elements)
    grid = sent.view(2, nodes, local, -1)
    two_hops = min(nodes, local) > 1
    node_sums = in_order(grid[0].transpose(0, 1))
    if case.in_bf16:
        node_sums = node_sums.bfloat16().float()
    first = in_order(node_sums) if two_hops else in_order(sent[0])
    assert torch.equal(after[0], first)

    off = (after[1].double() - sent.double().sum((0, 1))).abs()
    allowed = 2 * world * 2**-24 * sent.abs().sum((0, 1))
    if case.in_bf16 and two_hops:
        allowed += 2**-8 * 1.01 * grid.sum(2).abs().sum((0, 1))
    assert (off <= allowed).all(), (case, off.max())

    (poisoned,) = torch.nonzero(~after[2].isfinite(), as_tuple=True)
    assert poisoned.tolist() == ([3] if index == POISONED else [])


def fewest_bytes(case: Case, nodes: int, local: int) -> tuple[int, int]:
    """(inside its node, to other nodes) that a rank sends for each element of a shard.

    In one hop each gradient goes to its owner. In two those of a node for one owner cross as one sum.
    """
    itemsize, sum_size = case.sent.itemsize, 2 if case.in_bf16 else 4
    one_hop = (local - 1) * itemsize, (nodes - 1) * local * itemsize
    two_hops = nodes * (local - 1) * itemsize, (nodes - 1) * sum_size
    return two_hops if two_hops[1] <= one_hop[1] else one_hop


@pytest.mark.parametrize(
    "grids",
    [[(1, 1)], [(1, 4), (4, 1), (2, 2)], [(3, 2)], nightly([(2, 3)]), nightly([(2, 4)])],
)
def test_a_reduction_is_the_sum_over_all_ranks(grids: list[tuple[int, int]]) -> None:
    ranks = on_ranks(grids[0][0] * grids[0][1], reduce, grids)
    for (nodes, local), *by_rank in zip(grids, *ranks, strict=True):
        check_reduced(nodes, local, by_rank)


def test_one_plan_per_rank_says_what_its_ledger_counts() -> None:
    """Without a process group, and for ranks of any place: what all of them send, by link."""
    for case in CASES:
        for nodes, local in ((1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (2, 4), (24, 16)):
            for rank in {0, local - 1, nodes * local - 1}:
                reduction = case.plan(Topology(rank, nodes * local, rank % local, local)).reduction
                sent = [reduction.bytes_sent(layout, ROUNDS) for layout in layouts(nodes * local)]
                elements = sum(layout.shard_numel for layout in layouts(nodes * local))
                expected = tuple(elements * each for each in fewest_bytes(case, nodes, local))
                assert (sum(one.intra for one in sent), sum(one.inter for one in sent)) == expected


class Summed(NamedTuple):
    """The format that is sent, the format of sums in two steps, and the algorithm; by kernels or by torch."""

    sent: torch.dtype
    dtype: torch.dtype
    algorithm: ReductionAlgorithm
    kernels: bool = True

    def plan(self, topology: Topology, peer_writes: bool) -> ReductionPlan:
        """Of any stage 0, but for what is tried here."""
        reduction = Case(0, "bf16").plan(topology).reduction
        (hop,) = reduction.hops
        return dataclasses.replace(
            reduction,
            algorithm=self.algorithm,
            hops=(dataclasses.replace(hop, streams=(0,), format=self.dtype),),
            compute_dtype=self.sent,
            gradient_dtype=self.dtype,
            peer_writes=peer_writes and self.algorithm is not ReductionAlgorithm.LIBRARY,
        )


SUMMED = [
    Summed(torch.float32, torch.float32, ReductionAlgorithm.LIBRARY),
    Summed(torch.bfloat16, torch.bfloat16, ReductionAlgorithm.LIBRARY),
    Summed(torch.bfloat16, torch.float32, ReductionAlgorithm.LIBRARY),
    Summed(torch.float32, torch.float32, ReductionAlgorithm.TWO_STEP),
    Summed(torch.bfloat16, torch.bfloat16, ReductionAlgorithm.TWO_STEP),
    Summed(torch.bfloat16, torch.float32, ReductionAlgorithm.TWO_STEP),
    Summed(torch.float32, torch.float32, ReductionAlgorithm.LOCAL_SUM),
    Summed(torch.float32, torch.float32, ReductionAlgorithm.LOCAL_SUM, kernels=False),
    Summed(torch.bfloat16, torch.bfloat16, ReductionAlgorithm.LOCAL_SUM),
    Summed(torch.bfloat16, torch.float32, ReductionAlgorithm.LOCAL_SUM),
]


def all_reduce(
    topology: Topology, peer_buffers: bool = False
) -> list[tuple[list[numpy.ndarray], tuple[int, int]]]:
    """(the sums of all units, bytes sent) in several formats and by several algorithms.

    With `peer_buffers` processes write each other's memory where they sum; GPUs do without being told.
    """
    units, found = layouts(topology.world_size), []
    for case in SUMMED:
        ledger = TrafficLedger(topology)
        make_comm_stream = SharedMemoryStream if peer_buffers else CommStream
        everyone, uses_copy_engines = range(topology.world_size), copy_engines(topology)
        comm_stream = make_comm_stream(
            everyone, topology, this_device(), ledger, None, copy_engines=uses_copy_engines
        )
        kernels = operations() if case.kernels else None
        plan = case.plan(topology, peer_writes=comm_stream.writes_peers)
        reduction = build_reduction(plan, [comm_stream], kernels)
        comm_stream.ready()
        totals = [torch.full((layout.numel,), 7.0, device=this_device()) for layout in units]
        squares = [torch.full((layout.numel // 256,), 7.0, device=this_device()) for layout in units]
        sent = [gradients(topology.rank, i, layout, case.sent, 0) for i, layout in enumerate(units)]
        parts = [in_parts(flat.to(this_device())) for flat in sent]
        if case.sent == torch.float32:  # sums over micro-batches are where the result goes
            totals[0].copy_(sent[0])
            parts[0] = [GradSegment(0, totals[0])]
        pending = [
            reduction.reduce(
                gradient, Target(total, squares=its_squares if plan.returns_squared_norms else None)
            )
            for gradient, total, its_squares in zip(parts, totals, squares, strict=True)
        ]
        for one in pending:
            one.wait()
        for total, its_squares in zip(totals, squares, strict=True):
            expected = torch.empty_like(its_squares)
            sum_squares(kernels, total, expected)
            any_order = 0 if case.kernels else 2 * 256 * 2**-24
            if plan.returns_squared_norms:
                torch.testing.assert_close(its_squares, expected, rtol=any_order, atol=0)
        comm_stream.settle()
        sent_bytes = sum(
            (plan.bytes_sent(layout, 1 if case.sent != case.dtype else 2) for layout in units), SentBytes()
        )
        taken = ledger.take()
        assert taken == (sent_bytes.intra, sent_bytes.inter)
        found.append(([total.cpu().numpy().copy() for total in totals], taken))
        comm_stream.close()
    return found


def check_all_reduced(ranks: list[list[tuple[list[numpy.ndarray], tuple[int, int]]]]) -> None:
    """The sum in the order of the ranks, in two steps rounded once; the library's within its roundings."""
    world = len(ranks)
    for case, *results in zip(SUMMED, *ranks, strict=True):
        for index, layout in enumerate(layouts(world)):
            sent = torch.stack([gradients(r, index, layout, case.sent, 0) for r in range(world)]).float()
            expected = in_order(sent)
            if case.algorithm is not ReductionAlgorithm.LOCAL_SUM:
                expected = expected.to(case.dtype).float()
            allowed = world * torch.finfo(case.dtype).eps * sent.abs().sum(0)
            for totals, _ in results:
                off = (torch.from_numpy(totals[index]) - expected).abs()
                assert (off <= (allowed if case.algorithm is ReductionAlgorithm.LIBRARY else 0)).all()
        shares = (world - 1) * sum(layout.shard_numel for layout in layouts(world))
        there, back = case.sent.itemsize, case.dtype.itemsize
        moved = {
            ReductionAlgorithm.LIBRARY: 2 * back,
            ReductionAlgorithm.TWO_STEP: there + back,
            ReductionAlgorithm.LOCAL_SUM: world * there,
        }[case.algorithm]
        assert [sum(sent) for _, sent in results] == [shares * moved] * world


@pytest.mark.parametrize(("world", "peer_buffers"), [(2, False), (3, True)])
def test_whole_sums_are_on_all_ranks(world: int, peer_buffers: bool) -> None:
    check_all_reduced(on_ranks(world, all_reduce, peer_buffers))
