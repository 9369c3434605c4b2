"""Tries the network before a run uses it: ranks reach each other, sums are right, and rates are measured."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.rendezvous import RankAddress
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.links import BETWEEN, Ring, describe_rates, rings_of, slow_links, split_nodes

_BYTES = {"cpu": 2**20, "cuda": 2**26}  # of one message that is timed
_ROUNDS = 3  # the fastest counts, because another program may have used the processor
_SUMMANDS = 1000


def preflight(
    addresses: Sequence[RankAddress],
    device: torch.device,
    exchange: Exchange,
    activity: Activity,
    *,
    limit: float,
    sockets: str = "",
) -> list[str]:
    """Log lines on the rates of links, with warnings on slow ones; every rank must call it.

    `sockets` describes the choice for NCCL's TCP connections; it is shown with the rate between nodes. No
    part may take longer than `limit` seconds. Raises ValueError on every rank if data arrive changed, with
    the ranks and hosts concerned.
    """
    topology = exchange.topology
    if topology.world_size == 1:
        return []
    started = time.perf_counter()
    activity.now("preflight, a sum over all ranks", limit=limit)
    problem = _wrong_sum(topology, addresses, device)
    rates = []
    for ring in rings_of(topology):
        activity.now(f"preflight, messages {ring.name}", limit=limit)
        rate, damage = _time_ring(ring, topology.rank, addresses, device)
        problem = problem or damage
        rates.append((ring.name, rate, ring.neighbours(topology.rank)[1]))
    activity.now("preflight, results", limit=limit)
    reports = exchange.all_gather("reports", [problem, rates])
    problems = [problem for problem, _ in reports if problem]
    if problems:
        raise ValueError(f"the network corrupts data: {problems[0]}")
    warnings, parts = split_nodes(topology, addresses), []
    for index, (name, _, _) in enumerate(rates):
        received = [by_ring[index][1] for _, by_ring in reports]
        senders = [by_ring[index][2] for _, by_ring in reports]
        through = f", through {sockets}" if sockets and name == BETWEEN else ""
        parts.append(describe_rates(name, received) + through)
        if (
            device.type == "cuda" or name == BETWEEN
        ):  # inside a node of CPUs, a slow link is the scheduler's doing
            warnings += slow_links(name, received, senders, addresses)
    seconds = time.perf_counter() - started
    return [
        f" preflight: {topology.world_size} ranks in {seconds:.1f} s; {', '.join(parts)}",
        *(f" WARNING: {warning}" for warning in warnings),
    ]


def _wrong_sum(topology: Topology, addresses: Sequence[RankAddress], device: torch.device) -> str | None:
    """The error in a sum of integers whose result is known; None if it is right."""
    ranks = topology.world_size
    numbers = torch.arange(_SUMMANDS, device=device) * ranks  # int64
    total = numbers + topology.rank
    dist.all_reduce(total)
    expected = numbers * ranks + ranks * (ranks - 1) // 2
    wrong = int((total != expected).sum())
    if not wrong:
        return None
    return f"{wrong} of {_SUMMANDS} sums are wrong on rank {topology.rank} [{addresses[topology.rank]}]"


def _time_ring(
    ring: Ring, rank: int, addresses: Sequence[RankAddress], device: torch.device
) -> tuple[float, str | None]:
    """Bytes/s that this rank received, and the error in the data; None if there is none."""
    after, before = ring.neighbours(rank)
    numel = _BYTES[device.type] // 8
    sent = torch.arange(rank, rank + numel, device=device)
    received = torch.zeros_like(sent)
    _send(sent[:1], after, received[:1], before)  # connects
    _wait(device)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        _send(sent, after, received, before)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    rate = _BYTES[device.type] / min(seconds)
    if torch.equal(received, torch.arange(before, before + numel, device=device)):
        return rate, None
    return (
        rate,
        f"rank {rank} [{addresses[rank]}] did not receive what rank {before} [{addresses[before]}] sent",
    )


def _send(sent: Tensor, after: int, received: Tensor, before: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
