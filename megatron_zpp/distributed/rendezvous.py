"""Brings the ranks of a run together at a store of keys and values, and says who is missing."""

import fcntl
import json
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.open_files import make_room
from megatron_zpp.distributed.topology import Topology

SAY_AFTER = 10.0  # seconds of waiting, and again each time
_HANDSHAKE = 15.0  # seconds that a store has for its first answer
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


@dataclass(frozen=True)
class RankAddress:
    """Where a rank runs, and by which of its addresses it reaches rank 0."""

    host: str
    process: int
    address: str
    interface: str

    def __str__(self) -> str:
        return f"{self.host}, {self.interface} {self.address}"


@dataclass(frozen=True)
class Rendezvous:
    """The store that all ranks share, and where each of them runs."""

    store: dist.Store
    addresses: tuple[RankAddress, ...]


def rendezvous(
    topology: Topology,
    environment: Mapping[str, str],
    *,
    limit: float,
    timeout: timedelta,
    say: Callable[[str], None],
) -> Rendezvous:
    """Waits until every rank is at MASTER_ADDR and MASTER_PORT; `say` hears, every 10 s, who is not.

    Rank 0 keeps the store there, or torchrun does, and gets room for the connections of all ranks; `timeout`
    is what the store's own waits have. Raises ValueError, after `limit` seconds at most, that says which
    address, port or ranks are wrong, or that there cannot be room.
    """
    if topology.world_size == 1:
        return Rendezvous(dist.HashStore(), (RankAddress(platform.node(), os.getpid(), "127.0.0.1", "lo"),))
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    deadline = time.monotonic() + limit
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise option_error(
            "MASTER_ADDR", address, f"{error.strerror}; give rank 0's host, alike on every rank"
        ) from None
    launcher_keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher_keeps_store and topology.local_rank == 0 and any(map(_is_of_this_host, found)):
        make_room(os.getppid(), topology.world_size, say)
    if topology.rank == 0 and not launcher_keeps_store:
        make_room(os.getpid(), topology.world_size, say)
        store, own = _host(address, port, found, topology), str(found[0][4][0])
    else:
        own = _reach(address, port, topology, deadline, say)
        store = _join(address, port, deadline)
    store.set_timeout(timeout)
    # What ranks of a failed attempt left in a launcher's store is not for this one.
    store = dist.PrefixStore(f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    rank_address = RankAddress(platform.node(), os.getpid(), own, interface_of(own))
    return Rendezvous(store, _exchange_addresses(store, topology, rank_address, deadline, limit, say))


def interface_of(address: str) -> str:
    """The network interface of this host that has an IPv4 address; "?" when none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "?"


def _host(address: str, port: int, found: list[tuple], topology: Topology) -> dist.Store:
    """Rank 0's store."""
    if not any(map(_is_of_this_host, found)):
        raise option_error(
            "MASTER_ADDR",
            address,
            f"is no address of {platform.node()}, where rank 0 runs; it must be rank 0's host",
        )
    try:
        return dist.TCPStore(
            address,
            port,
            topology.world_size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        held = (
            "is held by another program there"
            if "EADDRINUSE" in str(error)
            else f"cannot be opened ({error})"
        )
        raise option_error(
            "MASTER_PORT", port, f"{held}: {platform.node()}; give a free port, alike on every rank"
        ) from None


def _is_of_this_host(found: tuple) -> bool:
    family, kind, protocol, _, where = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True


def _reach(address: str, port: int, topology: Topology, deadline: float, say: Callable[[str], None]) -> str:
    """Waits until rank 0's port accepts a connection; returns this host's address of it."""
    patience = Backoff(say)
    while True:
        try:
            with socket.create_connection((address, port), timeout=5) as probe:
                return probe.getsockname()[0]
        except OSError as error:
            why = error.strerror or str(error)
        problem = f"rank {topology.rank} on {platform.node()} cannot reach rank 0 at {address}:{port} ({why})"
        if time.monotonic() > deadline:
            raise option_error(
                "MASTER_ADDR and MASTER_PORT", (address, port), f"{problem}; is it rank 0's host?"
            )
        patience.wait(problem)


def _join(address: str, port: int, deadline: float) -> dist.Store:
    """The store of rank 0 or of torchrun. What else listens there may never answer: a thread asks it."""
    stores: list[dist.Store] = []
    problems: list[str] = []
    seconds = max(1.0, min(_HANDSHAKE, deadline - time.monotonic()))

    def ask() -> None:
        try:
            stores.append(
                dist.TCPStore(address, port, timeout=timedelta(seconds=seconds), wait_for_workers=False)
            )
        except (RuntimeError, ValueError) as error:
            problems.append(str(error).split(". Original")[0])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds + 1)
    if not stores:
        why = f" ({problems[0]})" if problems else ""
        raise option_error(
            "MASTER_PORT",
            port,
            f"what answers at {address}:{port} is not this run's store{why}; give all ranks one free port",
        )
    return stores[0]


def _exchange_addresses(
    store: dist.Store,
    topology: Topology,
    rank_address: RankAddress,
    deadline: float,
    limit: float,
    say: Callable[[str], None],
) -> tuple[RankAddress, ...]:
    """Every rank's place, once all are here."""
    rank, world = topology.rank, topology.world_size
    text = json.dumps(asdict(rank_address))
    if store.add(f"claims/{rank}", 1) > 1:
        other = _parse_rank_address(store.get(f"here/{rank}"))
        both = " and ".join(f"process {one.process} on {one.host}" for one in (other, rank_address))
        fix = f"is taken by {both}; give every process its own"
        store.set("roll", json.dumps(f"RANK {rank}: {fix}"))
        raise option_error("RANK", rank, fix)
    store.set(f"here/{rank}", text)
    store.add("here", 1)
    if rank == 0:
        problem = _await_all(store, topology, deadline, limit, say)
        store.set("roll", json.dumps(problem))
        if problem:
            time.sleep(0.3)  # others may be about to read it in this process
            raise ValueError(problem)
    else:
        _await_verdict(store, topology, rank_address, deadline)
    return tuple(map(_parse_rank_address, store.multi_get([f"here/{rank}" for rank in range(world)])))


def _await_verdict(store: dist.Store, topology: Topology, rank_address: RankAddress, deadline: float) -> None:
    """On other ranks: waits for rank 0's word. Raises ValueError, as on rank 0, when that is an error."""
    seconds = max(1.0, deadline - time.monotonic()) + SAY_AFTER
    try:
        store.wait(["roll"], timedelta(seconds=seconds))
        problem = json.loads(store.get("roll"))
    except dist.DistError:
        who = f"rank {topology.rank} on {rank_address.host}"
        raise ValueError(f"RANK 0: came and is gone, or does not answer {who}") from None
    if problem:
        raise ValueError(problem)


def _parse_rank_address(text: bytes) -> RankAddress:
    return RankAddress(**json.loads(text))


def _await_all(
    store: dist.Store, topology: Topology, deadline: float, limit: float, say: Callable[[str], None]
) -> str | None:
    """On rank 0: None once all are here, or what is wrong when some are not in time."""
    patience = Backoff(say)
    while store.add("here", 0) < topology.world_size:
        if store.check(["roll"]):
            return json.loads(store.get("roll"))
        missing = [rank for rank in range(topology.world_size) if not store.check([f"here/{rank}"])]
        if not missing:
            break
        who = f"rank{'s' * (len(missing) > 1)} {ranges(missing)} of {topology.world_size}"
        nodes = ranges(sorted({topology.node_of(rank) for rank in missing}))
        if time.monotonic() > deadline:
            return (
                f"WORLD_SIZE {topology.world_size}: {who} (node {nodes}) did not come within "
                f"--preflight-timeout {limit:g} s; start them with the same MASTER_ADDR and MASTER_PORT"
            )
        patience.wait(f"waiting for {who} (node {nodes})")
    return None


class Backoff:
    """Waits a little at a time, and tells every ten seconds what for."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._told, self._pause = say, time.monotonic(), 0.01

    def wait(self, problem: str) -> None:
        """Sleeps, longer each time, up to half a second."""
        if time.monotonic() - self._told > SAY_AFTER:
            self._told = time.monotonic()
            self._say(problem)
        time.sleep(self._pause)
        self._pause = min(0.5, 1.5 * self._pause)


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers in words: 0, 2-5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
