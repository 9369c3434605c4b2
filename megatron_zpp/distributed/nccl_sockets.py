"""Chooses with all ranks how many threads and sockets NCCL's TCP connections have.

NCCL reads its variables once per process, so they are set before the first communicator exists. By default
the one proxy thread of a communicator moves the data of all its connections, through one socket for each of
them. Where NCCL would do that, each connection gets 2 threads of 2 sockets. Where NCCL would use another
network, has a choice of its own, or was told one, everything is left to NCCL.
"""

import os
import platform
import resource
from collections.abc import MutableMapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_network import (
    NcclSettings,
    Network,
    other_network,
    read_nccl_settings,
    read_network,
)
from megatron_zpp.distributed.open_files import OTHER_FILES

THREADS, PER_THREAD = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
_THREADS, _PER_THREAD = 2, 2
SOCKETS = f"{_THREADS} threads × {_PER_THREAD} sockets"
_LEAST_CORES = 4
_VENDORS = {"0x1d0f": "AWS", "0x1ae0": "Google"}  # for whose cards NCCL has numbers of its own
# NCCL opens connections as it needs them. An estimate of the most: in two directions, on two channels, to the
# neighbours in rings and trees and to every other node, for each communicator between nodes.
_DIRECTIONS, _CHANNELS, _NEIGHBOURS, _COMMUNICATORS = 2, 2, 4, 6


class SocketChoice(NamedTuple):
    """Whether all ranks set NCCL's numbers, and why; no reason where there is nothing to say."""

    chosen: bool
    reason: str = ""

    @property
    def lines(self) -> list[str]:
        """For the log."""
        if not self.reason:
            return []
        numbers = f"{SOCKETS} per connection" if self.chosen else "left to NCCL"
        return [f" NCCL's sockets: {numbers}, because {self.reason}"]


class RankReport(NamedTuple):
    """What a rank tells the others: an objection, if it has one, and the cores that it may use."""

    objection: str | None
    host: str
    cores: str  # the affinity mask, hexadecimal


def choose_nccl_sockets(
    backend: str, exchange: Exchange, environment: MutableMapping[str, str]
) -> SocketChoice:
    """Choose with all ranks, before the first communicator exists; set NCCL's variables in `environment`."""
    nodes = exchange.topology.nodes
    if backend != "nccl" or nodes == 1:
        return SocketChoice(False)
    settings = read_nccl_settings(environment)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = None if soft == resource.RLIM_INFINITY else soft
    objection = objection_to(nodes, settings, read_network(), files)
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    report = RankReport(objection, platform.node(), f"{mask:x}")
    choice = SocketChoice(*exchange.combine("nccl_sockets", report, agree))
    if choice.chosen:
        environment.update({THREADS: str(_THREADS), PER_THREAD: str(_PER_THREAD)})
    return choice


def objection_to(nodes: int, settings: NcclSettings, network: Network, files: int | None) -> str | None:
    """Why this rank leaves the numbers to NCCL; None where NCCL would use TCP as it does by default.

    `files` is the limit of open files; None for no limit.
    """
    for name in (THREADS, PER_THREAD):
        if settings.get(name):
            return settings.describe(name)
    if other := other_network(settings, network):
        return other
    for interface, vendor in network.vendors:
        if vendor in _VENDORS:
            return f"{interface} is a card by {_VENDORS[vendor]}, for which NCCL has numbers of its own"
    need = files_needed(nodes)
    if files is None or files >= need:
        return None
    return f"sockets to {nodes - 1} other nodes need about {need} open files, and ulimit -n is {files}"


def agree(reports: Sequence[Sequence[Any]]) -> SocketChoice:
    """What all ranks do by their RankReports, as JSON has them."""
    of_ranks = list(starmap(RankReport, reports))
    objections = [report.objection for report in of_ranks]
    for rank, objection in enumerate(objections):  # the first rank's, named where not all say the same
        if objection:
            where = f" [rank {rank} on {of_ranks[rank].host}]" if len(set(objections)) > 1 else ""
            return SocketChoice(False, f"{objection}{where}")
    cores = cores_of_ranks(of_ranks)
    rank = min(range(len(cores)), key=cores.__getitem__)
    if cores[rank] < _LEAST_CORES:
        where = f"rank {rank} on {of_ranks[rank].host}"
        fix = f"has {cores[rank]:.3g} cores, and threads for sockets pay from {_LEAST_CORES} on"
        return SocketChoice(False, f"{where} {fix}")
    return SocketChoice(True, "NCCL uses TCP and would have one socket")


def cores_of_ranks(reports: Sequence[RankReport]) -> list[float]:
    """Cores that each rank has to itself: ranks of a host share those that several of them may use."""
    masks: dict[str, list[int]] = {}
    for report in reports:
        masks.setdefault(report.host, []).append(int(report.cores, 16))
    cores = []
    for report in reports:
        own = int(report.cores, 16)
        sharing = sum(1 for mask in masks[report.host] if mask & own)
        cores.append(own.bit_count() / max(1, sharing))
    return cores


def files_needed(nodes: int) -> int:
    """About as many open files as a rank needs; each connection has one socket more than its data has."""
    peers = _NEIGHBOURS + nodes - 1
    connections = _DIRECTIONS * _CHANNELS * peers * _COMMUNICATORS
    return connections * (_THREADS * _PER_THREAD + 1) + OTHER_FILES
