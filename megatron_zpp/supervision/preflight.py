"""Tries the network before a run uses it: ranks reach each other, sums are right, and rates are measured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.config.words import counted
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.rank_addresses import RankAddress, Rendezvous
from megatron_zpp.mesh import Mesh
from megatron_zpp.supervision.activity import Activity

INSIDE, BETWEEN = "inside a node", "between nodes"
_BYTES = {"cpu": 2**20, "cuda": 2**26}  # of one message that is timed
_ROUNDS = 3  # the fastest counts, because another program may have used the processor
_SUMMANDS = 1000
_SLOW = 0.5  # share of the median rate below which a link gets a warning


@dataclass(frozen=True)
class Ring:
    """A round of messages: every member sends to the next and receives from the previous at once."""

    name: str
    members: Sequence[int]

    def neighbours(self, rank: int) -> tuple[int, int]:
        """The ranks that `rank` sends to and receives from."""
        index, size = self.members.index(rank), len(self.members)
        return self.members[(index + 1) % size], self.members[index - 1]


def preflight(
    met: Rendezvous,
    device: torch.device,
    exchange: Exchange,
    activity: Activity,
    *,
    limit: float,
    sockets: str = "",
) -> list[str]:
    """Log lines on the rates of links, with warnings on slow ones; every rank must call it.

    Each rank exchanges messages with two neighbours per ring, and only rank 0 reads the rates of all ranks.
    `sockets` describes the choice for NCCL's TCP connections; it is shown with the rate between nodes. No
    part may take longer than `limit` seconds. Raises ValueError on every rank if data arrive changed, with
    the ranks and hosts concerned.
    """
    mesh = exchange.topology.mesh()
    if mesh.world_size == 1:
        return []
    started = time.perf_counter()
    activity.now("preflight, a sum over all ranks", limit=limit)
    wrong, rings = _wrong_sums(mesh, device), rings_of(mesh)
    rates, damaged = [], []
    for ring in rings:
        activity.now(f"preflight, messages {ring.name}", limit=limit)
        rate, whole = _time_ring(ring, mesh.rank, device)
        rates.append(rate)
        damaged += [] if whole else [ring.neighbours(mesh.rank)[1]]
    activity.now("preflight, results", limit=limit)

    def results(reports: list[list[Any]]) -> list[Any]:
        if problem := _problem(reports, met.addresses):
            return [problem, []]
        lines, warnings = [], split_nodes(mesh, met.addresses)
        for index, ring in enumerate(rings):
            received = [theirs[index] for _, _, theirs in reports]
            through = f", through {sockets}" if sockets and ring.name == BETWEEN else ""
            lines.append(describe_rates(ring.name, received) + through)
            # Inside a node of CPUs, a slow link is the scheduler's doing.
            if device.type == "cuda" or ring.name == BETWEEN:
                senders = [rings_of(mesh.at(rank))[index].neighbours(rank)[1] for rank in range(len(reports))]
                warnings += slow_links(ring.name, received, senders, met.addresses)
        seconds = time.perf_counter() - started
        said = f" preflight: {counted(mesh.world_size, 'rank')} in {seconds:.1f} s; {', '.join(lines)}"
        return [None, [said, *(f" WARNING: {warning}" for warning in warnings)]]

    problem, lines = exchange.combine("reports", [wrong, damaged, rates], results)
    if problem:
        raise ValueError(f"the network corrupts data: {problem}")
    return lines


def _problem(reports: list[list[Any]], addresses: Sequence[RankAddress]) -> str | None:
    """The wrong sums or the damaged message of the first rank that reports some; None if all data are right.

    A report: the number of wrong sums, the ranks whose messages arrived damaged, and rates.
    """
    for rank, (wrong, damaged, _) in enumerate(reports):
        who = f"rank {rank} [{addresses[rank]}]"
        if wrong:
            return f"{wrong} of {_SUMMANDS} sums are wrong on {who}"
        if damaged:
            sender = f"rank {damaged[0]} [{addresses[damaged[0]]}]"
            return f"{who} did not receive what {sender} sent"
    return None


def _wrong_sums(mesh: Mesh, device: torch.device) -> int:
    """The number of wrong sums of integers, of which the right ones are known."""
    ranks = mesh.world_size
    numbers = torch.arange(_SUMMANDS, device=device) * ranks  # int64
    total = numbers + mesh.rank
    dist.all_reduce(total)
    expected = numbers * ranks + ranks * (ranks - 1) // 2
    return int((total != expected).sum())


def _time_ring(ring: Ring, rank: int, device: torch.device) -> tuple[float, bool]:
    """Bytes/s that this rank received, and whether it received what its neighbour sent."""
    after, before = ring.neighbours(rank)
    numel = _BYTES[device.type] // 8
    sent = torch.arange(rank, rank + numel, device=device)
    received = torch.zeros_like(sent)
    _send(sent[:1], after, received[:1], before)  # connects
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        _send(sent, after, received, before)
        seconds.append(time.perf_counter() - started)
    rate = _BYTES[device.type] / min(seconds)
    return rate, torch.equal(received, torch.arange(before, before + numel, device=device))


def _send(sent: Tensor, after: int, received: Tensor, before: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if sent.is_cuda:
        torch.cuda.synchronize(sent.device)


def rings_of(mesh: Mesh) -> list[Ring]:
    """The rings of a rank: the ranks of its node, and those of its place in all nodes."""
    rings = [Ring(INSIDE, mesh.ranks(*mesh.inside_node)), Ring(BETWEEN, mesh.ranks(mesh.node))]
    return [ring for ring in rings if len(ring.members) > 1]


def describe_rates(name: str, rates: Sequence[float]) -> str:
    """One line on the bytes/s that each rank received."""
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return (
        f"{name} {_gigabytes(median(rates))} per rank, at least {_gigabytes(rates[slowest])} (rank {slowest})"
    )


def slow_links(
    name: str, rates: Sequence[float], senders: Sequence[int], addresses: Sequence[RankAddress]
) -> list[str]:
    """A line per rank that received at less than half the median rate: the slowest first, at most four."""
    usual = median(rates)
    slow = sorted((rate, rank) for rank, rate in enumerate(rates) if rate < _SLOW * usual)
    return [
        f"a slow link {name}: rank {rank} [{addresses[rank]}] receives {_gigabytes(rate)} from rank "
        f"{senders[rank]} [{addresses[senders[rank]]}], and ranks usually {_gigabytes(usual)}"
        for rate, rank in slow[:4]
    ]


def split_nodes(mesh: Mesh, addresses: Sequence[RankAddress]) -> list[str]:
    """A line for each node, as the launcher counts them, whose ranks are on several hosts."""
    lines = []
    for first in mesh.at(0).ranks(mesh.node):
        hosts = [addresses[rank].host for rank in mesh.at(first).ranks(*mesh.inside_node)]
        if len(set(hosts)) > 1:
            other = next(index for index, host in enumerate(hosts) if host != hosts[0])
            lines.append(
                f"ranks {first} and {first + other} are told to share node {mesh.node_of(first)}, but "
                f"run on {hosts[0]} and {hosts[other]}: LOCAL_WORLD_SIZE {mesh.node_size} is wrong"
            )
    return lines


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
