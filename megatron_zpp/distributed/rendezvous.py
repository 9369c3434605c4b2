"""Connects several ranks to one key-value store, and names the ranks that are missing."""

import fcntl
import json
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.job_store import ForeignValue, JobStore, derived, job_key
from megatron_zpp.distributed.lifelines import Lifelines
from megatron_zpp.distributed.open_files import reserve_connections
from megatron_zpp.distributed.rank_addresses import SAY_AFTER, RankAddress, Rendezvous, ranges
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.background import started

_Answer = TypeVar("_Answer")
_GAVE_UP = "gave_up"  # in the store: the verdict of a rank that rank 0 did not answer
_HANDSHAKE = 15.0  # seconds for the first answer of a store
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def rendezvous(
    topology: Topology,
    environment: Mapping[str, str],
    timeout: timedelta,
    *,
    say: Callable[[str], None],
    ended: Callable[[str], None],
) -> Rendezvous:
    """Connect to the store at MASTER_ADDR:MASTER_PORT and wait for all ranks, for at most `timeout`.

    `timeout` counts from the start of this rank, or if rank 0 started later, from the start of rank 0.
    Rank 0 or torchrun hosts the store; its limit of open files is raised for the connections of all ranks.
    `say` receives a message about missing ranks every 10 s; `ended` one about a rank that has connected and
    was killed, see `Lifelines`. `timeout` is that of later waits too.
    Raises ValueError naming the address, port or ranks that are wrong, or a limit that is too low.

    Rank 0 publishes a random text, from which the key of this start follows. Every other rank answers with
    one of its own, which rank 0 repeats. So no rank takes what an earlier start has signed.
    """
    key = job_key(environment)
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = f"{error.strerror}; give rank 0's host on every rank"
        raise option_error("MASTER_ADDR", address, fix) from None
    launcher_keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher_keeps_store and topology.local_rank == 0 and any(map(_is_of_this_host, found)):
        reserve_connections(os.getppid(), topology.world_size, say)
    if topology.rank == 0 and not launcher_keeps_store:
        reserve_connections(os.getpid(), topology.world_size, say, topology.world_size - 1)
        store, own = _host(address, port, found, topology), str(found[0][4][0])
    else:
        own = _reach(address, port, topology, deadline, say)
        store = _join(address, port, deadline)
    store.set_timeout(timeout)
    # The launcher's store outlives a failed attempt: this attempt must not read that attempt's keys.
    attempt = f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    of_job = JobStore(dist.PrefixStore(attempt, store), key)
    rank_address = RankAddress(platform.node(), os.getpid(), own, interface_of(own))
    meeting = _Meeting(of_job, topology, rank_address, say, deadline, timeout.total_seconds() / 60)
    lifelines = Lifelines(topology, ended)

    def join() -> tuple[JobStore, tuple[RankAddress, ...]]:
        store, listens_at = meeting.meet_rank_0(lifelines)
        lifelines.start(listens_at, address, derived(store.key, "lifelines").hex())
        try:
            return store, meeting.exchange_addresses(store)
        except ValueError as error:
            if topology.rank == 0:
                _decide(store, str(error))  # unless that is how it was decided
                time.sleep(0.3)  # this process may host the store, from which others still read the verdict
            raise

    try:
        of_start, addresses = _answer(join, lambda: meeting.deadline + 2 * SAY_AFTER)
    except BaseException as error:
        lifelines.leave()
        if not isinstance(error, TimeoutError):
            raise
        silence = f"does not answer rank {topology.rank} on {rank_address.host}; see rank 0's output"
        raise ValueError(f"RANK 0: {silence}") from None
    lifelines.all_present()
    return Rendezvous(of_start, rank_address, addresses, lifelines)


@dataclass
class _Meeting:
    """A rank on its way to the others, which wait for it."""

    store: JobStore  # with the key that all starts of the job share
    topology: Topology
    own: RankAddress
    say: Callable[[str], None]
    deadline: float  # on the clock of this process, when it stops waiting for the others
    minutes: float  # --distributed-timeout-minutes

    @property
    def left(self) -> float:
        """Seconds until the deadline; at least 1, for a last answer."""
        return max(1.0, self.deadline - time.monotonic())

    @property
    def keys(self) -> list[str]:
        """The keys of the addresses of all ranks."""
        return [f"here/{rank}" for rank in range(self.topology.world_size)]

    def meet_rank_0(self, lifelines: Lifelines) -> tuple[JobStore, int]:
        """Publish on rank 0, and learn on others, where it listens for lifelines and how long it will wait.

        Returns the store with the key of this start, for which rank 0 chooses a text, and rank 0's port.
        The others wait as long as rank 0: those that gave up earlier would be counted as present. What they
        read are seconds, because the clocks of hosts differ; rank 0 may have fewer left by then.
        """
        if self.topology.rank == 0:
            port, salt = lifelines.listen(), secrets.token_hex(16)
            self.store.set("rank_0", json.dumps({"salt": salt, "seconds": self.left, "lifelines": port}))
            return self.store.of_start(salt), port
        try:
            rank_0 = self._await_rank_0(self.store, "rank_0")
        except ForeignValue:  # rank 0 cannot read this either, and ends all others
            self.store.set(f"here/{self.topology.rank}", "null")
            raise
        self.deadline = max(self.deadline, time.monotonic() + rank_0["seconds"])
        return self.store.of_start(rank_0["salt"]), rank_0["lifelines"]

    def exchange_addresses(self, store: JobStore) -> tuple[RankAddress, ...]:
        """Publish this rank's address and wait for all ranks. Rank 0 returns their addresses, others nothing.

        Raises ForeignValue if `store` has the key of an earlier start.
        """
        rank, number = self.topology.rank, secrets.token_hex(16)
        text = json.dumps([number, asdict(self.own)])
        there = store.compare_set(f"here/{rank}", "", text).decode()
        if there != text:
            other = _parse_answer(there)[1]
            both = " and ".join(f"process {one.process} on {one.host}" for one in (other, self.own))
            fix = f"is taken by {both}; give every process its own rank"
            _decide(store, f"RANK {rank}: {fix}")  # unless the ranks have met
            raise option_error("RANK", rank, fix)
        if rank > 0:
            if problem := self._await_rank_0(store, "verdict"):
                raise ValueError(problem)
            echo = f"echo/{rank}"
            if not store.check([echo]) or store.get(echo).decode() != number:
                raise ForeignValue(
                    "'rank_0' in the run's store is of an earlier start of the job: another program wrote it "
                    "again; keep other users from MASTER_PORT"
                )
            return ()
        problem, addresses = self._await_all(store), ()
        if problem is None:
            numbers, addresses = zip(*map(_parse_answer, store.multi_get(self.keys)), strict=True)
            store.multi_set([f"echo/{other}" for other in range(len(numbers))], list(numbers))
        if problem := _decide(store, problem):
            raise ValueError(problem)
        return addresses

    def _await_rank_0(self, store: JobStore, key: str) -> Any:
        """On ranks other than 0: wait for a value that rank 0 publishes.

        If it does not, this rank gives up, and makes that the verdict: the others, which may have seen this
        rank, then end too. Raises ValueError with the verdict, unless that is that all ranks are there.
        """
        problem = (
            f"RANK 0: has ended, or did not answer rank {self.topology.rank} on {self.own.host} within "
            f"--distributed-timeout-minutes {self.minutes:g}; see rank 0's output"
        )
        with suppress(dist.DistError):
            store.wait([key], timedelta(seconds=self.left + SAY_AFTER))
            return _parsed(key, store.get(key))
        verdict: str | None = problem
        with suppress(dist.DistError):  # the store has ended, and with it what all ranks share
            verdict = _decide(store, problem, key if key == "verdict" else _GAVE_UP)
        if verdict or key != "verdict":
            raise ValueError(verdict or problem)
        return None

    def _await_all(self, store: JobStore) -> str | None:
        """On rank 0: wait for all. Returns None, or the problem if some are late or claim the same rank."""
        patience, world_size, who = Backoff(self.say), self.topology.world_size, ""
        while not store.check(self.keys):  # one request for all ranks
            for decided, key in ((store, "verdict"), (self.store, _GAVE_UP)):
                if decided.check([key]):
                    return _parsed(key, decided.get(key))
            late = time.monotonic() > self.deadline
            if late or patience.due:
                missing = [rank for rank, key in enumerate(self.keys) if not store.check([key])]
                if not missing:
                    break
                nodes = ranges(sorted(set(map(self.topology.mesh().node_of, missing))))
                ranks = f"rank{'s' * (len(missing) > 1)} {ranges(missing)}"
                who = f"{ranks} of {world_size} (node {nodes})"
            if late:
                return (
                    f"WORLD_SIZE {world_size}: {who} did not connect within --distributed-timeout-minutes "
                    f"{self.minutes:g}; start them with the same MASTER_ADDR and MASTER_PORT"
                )
            patience.wait(f"waiting for {who}")
        return None


def _answer(ask: Callable[[], _Answer], until: Callable[[], float]) -> _Answer:
    """Return what `ask` returns, or raise what it raises; TimeoutError if it is not done at `until()`.

    That time may move. A request to a store whose process is stopped, or behind a link that is cut, waits
    without a limit, and so does one to a program that is no store.
    """
    answer = started(ask, "rendezvous")
    while not answer.done() and (left := until() - time.monotonic()) > 0:
        wait([answer], left)
    if not answer.done():
        raise TimeoutError
    return answer.result()


def interface_of(address: str) -> str:
    """Return the network interface of this host with this IPv4 address; "?" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "?"


def _host(address: str, port: int, found: list[tuple], topology: Topology) -> dist.Store:
    """Start and return the store on rank 0. Raises ValueError if address or port cannot be used."""
    if not any(map(_is_of_this_host, found)):
        fix = f"is not an address of {platform.node()}, where rank 0 runs; must be rank 0's host"
        raise option_error("MASTER_ADDR", address, fix)
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
        taken = "EADDRINUSE" in str(error)
        held = "is held by another program there" if taken else f"cannot be opened ({error})"
        fix = f"{held}: {platform.node()}; give the same free port on every rank"
        raise option_error("MASTER_PORT", port, fix) from None


def _is_of_this_host(found: tuple) -> bool:
    family, kind, protocol, _, where = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True


def _reach(address: str, port: int, topology: Topology, deadline: float, say: Callable[[str], None]) -> str:
    """Wait until rank 0's port accepts a connection; return this host's address in that connection."""
    patience = Backoff(say)
    while True:
        try:
            with socket.create_connection((address, port), timeout=5) as probe:
                return probe.getsockname()[0]
        except OSError as error:
            why = error.strerror or str(error)
        problem = f"rank {topology.rank} on {platform.node()} cannot reach rank 0 at {address}:{port} ({why})"
        if time.monotonic() > deadline:
            fix = f"{problem}; is it rank 0's host?"
            raise option_error("MASTER_ADDR and MASTER_PORT", (address, port), fix)
        patience.wait(problem)


def _join(address: str, port: int, deadline: float) -> dist.Store:
    """Connect to the store of rank 0 or torchrun."""
    seconds = max(1.0, min(_HANDSHAKE, deadline - time.monotonic()))
    timeout, end = timedelta(seconds=seconds), time.monotonic() + seconds + 1
    try:
        return _answer(
            lambda: dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False), lambda: end
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        text = str(error).split(". Original")[0]
        why = text and f" ({text})"
        fix = f"the program at {address}:{port} is not this run's store{why}; give all ranks one free port"
        raise option_error("MASTER_PORT", port, fix) from None


def _decide(store: dist.Store, verdict: str | None, key: str = "verdict") -> str | None:
    """Publish None if all ranks are there, or a problem. Returns what counts, the first such verdict."""
    if store.check([key]):  # if it is empty, a stranger's, it would be replaced, but others may have read it
        return _parsed(key, store.get(key))
    return _parsed(key, store.compare_set(key, "", json.dumps(verdict)))


def _parsed(key: str, value: str | bytes) -> Any:
    """The JSON of a key. Raises ForeignValue for an empty value, which no rank writes here."""
    if not value:
        raise ForeignValue(f"{key!r} in the run's store is empty: another program did that")
    return json.loads(value)


def _parse_answer(text: str | bytes) -> tuple[str, RankAddress]:
    number, address = _parsed("here", text)
    return number, RankAddress(**address)


class Backoff:
    """Sleeps for increasing intervals, with a message every 10 s."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._told, self._pause = say, time.monotonic(), 0.01

    @property
    def due(self) -> bool:
        """Whether it is time for a message."""
        return time.monotonic() - self._told > SAY_AFTER

    def wait(self, problem: str) -> None:
        """Sleep, longer each time, up to 0.5 s; `problem` is the message if one is due."""
        if self.due and problem:
            self._told = time.monotonic()
            self._say(problem)
        time.sleep(self._pause)
        self._pause = min(0.5, 1.5 * self._pause)
