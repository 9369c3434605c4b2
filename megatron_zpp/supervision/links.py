"""Describes the links between ranks as the preflight measured them; arithmetic without ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_zpp.distributed.rendezvous import RankAddress
from megatron_zpp.distributed.topology import Topology

INSIDE, BETWEEN = "inside a node", "between nodes"
_SLOW = 0.5  # share of the median rate below which a link gets a warning


@dataclass(frozen=True)
class Ring:
    """A round of messages: every member sends to the next and receives from the previous at once."""

    name: str
    members: range

    def neighbours(self, rank: int) -> tuple[int, int]:
        """The ranks that `rank` sends to and receives from."""
        index, size = self.members.index(rank), len(self.members)
        return self.members[(index + 1) % size], self.members[index - 1]


def rings_of(topology: Topology) -> list[Ring]:
    """The rings of a rank: the ranks of its node, and its cross-node ranks."""
    rings = [Ring(INSIDE, topology.node_ranks), Ring(BETWEEN, topology.cross_node_ranks)]
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


def split_nodes(topology: Topology, addresses: Sequence[RankAddress]) -> list[str]:
    """A line for each node, as the launcher counts them, whose ranks are on several hosts."""
    lines = []
    for first in range(0, topology.world_size, topology.local_world_size):
        hosts = [rank_address.host for rank_address in addresses[first : first + topology.local_world_size]]
        if len(set(hosts)) > 1:
            other = next(index for index, host in enumerate(hosts) if host != hosts[0])
            lines.append(
                f"ranks {first} and {first + other} are told to share node {topology.node_of(first)}, but "
                f"run on {hosts[0]} and {hosts[other]}: LOCAL_WORLD_SIZE {topology.local_world_size} is wrong"
            )
    return lines


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
