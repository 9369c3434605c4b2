"""The schedule of two hops: both links busy, two hops 2 at once, and no buffer filled before it is sent."""

import threading

import torch

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.distributed.traffic import TrafficLedger
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.hop import Buffer
from megatron_zpp.zero.reduction_plan import ReductionBuffers
from tests.zero.ranks import on_ranks

UNITS, SECONDS = 3, 120.0


def hold_hop_two(topology: Topology) -> tuple[list[bool], list[list[float]]]:
    """Whether hops 1, and the second hop 2, ran while hop 2 of the unit before was held; what arrived."""
    comm_streams = [
        CommStream(ranks, topology, torch.device("cpu"), TrafficLedger(topology), None)
        for ranks in (topology.node_ranks, topology.cross_node_ranks, topology.cross_node_ranks)
    ]
    inside, *between = comm_streams
    sums = Buffer(2, torch.float32)
    hops = TwoHops(inside, between, ReductionBuffers(node_sums=sums, received_sums=sums))
    filled, present = ([threading.Event() for _ in range(UNITS)] for _ in range(2))
    beside, pending = [], []
    arrived: list[list[float]] = [[] for _ in range(UNITS)]

    def fill(sums: torch.Tensor, unit: int) -> None:
        sums.fill_(10 * unit + topology.rank)
        filled[unit].set()

    def take(received: torch.Tensor, unit: int) -> None:
        present[unit].set()
        beside.append(filled[min(unit + 1, UNITS - 1)].wait(SECONDS))
        if unit == 0:
            beside.append(present[1].wait(SECONDS))
        if unit + 2 < UNITS:  # has this unit's buffer
            assert not filled[unit + 2].is_set()
        arrived[unit] = received.tolist()  # the last two units may arrive in any order

    for unit in range(UNITS):
        pending.append(
            hops.submit(2, lambda sums, unit=unit: fill(sums, unit), lambda all, unit=unit: take(all, unit))
        )
    for one in pending:
        one.wait()
    for comm_stream in comm_streams:
        comm_stream.close()
    return beside, arrived


def test_hop_one_runs_beside_hop_two_of_the_unit_before() -> None:
    """On 2 × 2 ranks, whose cross-node ranks are two ranks away."""
    for rank, (beside, arrived) in enumerate(on_ranks(4, hold_hop_two, ranks_per_node=2)):
        assert all(beside)
        place = rank % 2
        assert arrived == [[10.0 * unit + place, 10.0 * unit + place + 2] for unit in range(UNITS)]
