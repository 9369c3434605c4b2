"""Chooses with all ranks how many threads and sockets NCCL's TCP connections have (--nccl-sockets).

NCCL reads its variables once per process, so they are set before the first communicator exists. By default
the one proxy thread of a communicator moves the data of all its connections, through one socket for each of
them. `auto` gives each connection 2 threads of 2 sockets where NCCL would do that, and leaves everything to
NCCL where it would use another network, has a choice of its own, or was told one.
"""

import os
import platform
import resource
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.nccl_sockets import FLAG, explicit_sockets
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_network import (
    NcclSettings,
    Network,
    as_number,
    chosen_network,
    other_network,
    read_nccl_settings,
    read_network,
)

THREADS, PER_THREAD = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
AUTO = (2, 2)
_LEAST_CORES = 4
_VENDORS = {"0x1d0f": "AWS", "0x1ae0": "Google"}  # for whose cards NCCL has numbers of its own
# NCCL opens connections as it needs them. An estimate of the most: in two directions, on two channels, to the
# neighbours in rings and trees and to every other node, for each communicator between nodes.
_DIRECTIONS, _CHANNELS, _NEIGHBOURS, _COMMUNICATORS = 2, 2, 4, 6
_OTHER_FILES = 256  # libraries, devices, data and logs of the process


@dataclass(frozen=True)
class SocketChoice:
    """Threads and sockets per thread that all ranks set, or None to leave both to NCCL, and why.

    The reason is empty where there is nothing to say: without NCCL, or on one node.
    """

    sockets: tuple[int, int] | None
    reason: str = ""

    def environment(self) -> dict[str, str]:
        """The variables that tell NCCL."""
        if self.sockets is None:
            return {}
        threads, per_thread = self.sockets
        return {THREADS: str(threads), PER_THREAD: str(per_thread)}

    def lines(self) -> list[str]:
        """For the log."""
        if not self.reason:
            return []
        if self.sockets is None:
            return [f" NCCL's sockets: left to NCCL, because {self.reason}"]
        return [f" NCCL's sockets: {self.describe()} per connection, because {self.reason}"]

    def describe(self) -> str:
        """The numbers, where some are set."""
        if self.sockets is None:
            return ""
        threads, per_thread = self.sockets
        return f"{threads} threads × {per_thread} sockets"


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others: an objection, if it has one, and the cores that it may use."""

    objection: str | None
    host: str
    cores: str  # the affinity mask, hexadecimal


def choose_nccl_sockets(
    value: str, backend: str, exchange: Exchange, environment: MutableMapping[str, str]
) -> SocketChoice:
    """Choose by --nccl-sockets `value`, alike on all ranks, and set NCCL's variables in `environment`.

    Every rank must call it, before the first communicator exists. Raises ValueError on every rank where
    numbers that were given cannot be obeyed.
    """
    wanted, topology = explicit_sockets(value), exchange.topology
    if backend != "nccl":
        if wanted is None:
            return SocketChoice(None)
        fix = f"needs --distributed-backend nccl, and this run uses {backend}; omit it"
        raise option_error(FLAG, value, fix)
    if value == "off" or (wanted is None and topology.nodes == 1):
        return SocketChoice(None, f"of {FLAG} off" if topology.nodes > 1 else "")
    settings = read_nccl_settings(environment)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = None if soft == resource.RLIM_INFINITY else soft
    if wanted is None:
        objection = auto_objection(topology.nodes, settings, read_network(settings), files)
    else:
        objection = explicit_objection(wanted, topology.nodes, settings, files)
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    report = RankReport(objection, platform.node(), f"{mask:x}")
    problem, choice = exchange.combine("nccl_sockets", asdict(report), partial(_agreed, value))
    if problem:
        raise ValueError(problem)
    sockets, reason = choice
    choice = SocketChoice(sockets and tuple(sockets), reason)
    environment.update(choice.environment())
    return choice


def _agreed(value: str, reports: list[dict[str, Any]]) -> list[Any]:
    """The problem and the choice by the reports of all ranks, as JSON values; one of them is None."""
    try:
        choice = agree(value, [RankReport(**report) for report in reports])
    except ValueError as error:
        return [str(error), None]
    return [None, [choice.sockets, choice.reason]]


def auto_objection(nodes: int, settings: NcclSettings, network: Network, files: int | None) -> str | None:
    """Why this rank does not want `auto` to choose; None where NCCL would use TCP as it does by default.

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
    return _too_many_files(AUTO, nodes, files)


def explicit_objection(
    wanted: tuple[int, int], nodes: int, settings: NcclSettings, files: int | None
) -> str | None:
    """What contradicts numbers that were given, and the remedy; None where nothing does."""
    for name, number in zip((THREADS, PER_THREAD), wanted, strict=True):
        if settings.get(name) and as_number(settings.get(name)) != number:
            return f"{settings.describe(name)}; unset one of them"
    if other := chosen_network(settings):
        return f"{other}, and only Socket has these numbers; unset one of them"
    problem = _too_many_files(wanted, nodes, files)
    return problem and f"{problem}; raise the hard limit (ulimit -Hn), or give fewer sockets"


def agree(value: str, reports: Sequence[RankReport]) -> SocketChoice:
    """What all ranks do by the reports of all, by rank.

    Raises ValueError where one objects to numbers that were given.
    """
    wanted = explicit_sockets(value)
    objection = _first_objection(reports)
    if wanted is not None:
        if objection:
            raise option_error(FLAG, value, objection)
        return SocketChoice(wanted, f"of {FLAG} {value}")
    objection = objection or _too_few_cores(reports)
    if objection:
        return SocketChoice(None, objection)
    return SocketChoice(AUTO, f"NCCL uses TCP and would have one socket ({FLAG} auto)")


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


def files_needed(sockets: tuple[int, int], nodes: int) -> int:
    """About as many open files as a rank needs; each connection has one socket more than its data has."""
    threads, per_thread = sockets
    peers = _NEIGHBOURS + nodes - 1
    connections = _DIRECTIONS * _CHANNELS * peers * _COMMUNICATORS
    return connections * (threads * per_thread + 1) + _OTHER_FILES


def _first_objection(reports: Sequence[RankReport]) -> str | None:
    """The first rank's, with its name where not all ranks say the same."""
    objections = [report.objection for report in reports]
    rank = next((rank for rank, objection in enumerate(objections) if objection), None)
    if rank is None:
        return None
    if len(set(objections)) == 1:
        return objections[0]
    return f"{objections[rank]} [rank {rank} on {reports[rank].host}]"


def _too_few_cores(reports: Sequence[RankReport]) -> str | None:
    cores = cores_of_ranks(reports)
    rank = min(range(len(cores)), key=cores.__getitem__)
    if cores[rank] >= _LEAST_CORES:
        return None
    where = f"rank {rank} on {reports[rank].host}"
    return f"{where} has {cores[rank]:.3g} cores, and threads for sockets pay from {_LEAST_CORES} on"


def _too_many_files(sockets: tuple[int, int], nodes: int, files: int | None) -> str | None:
    need = files_needed(sockets, nodes)
    if files is None or files >= need:
        return None
    return f"sockets to {nodes - 1} other nodes need about {need} open files, and ulimit -n is {files}"
