"""Requests that many ranks send to their store: `python benchmarks/store_traffic.py [--ranks 64 256 1024]`.

Threads of a few processes are the ranks. Each runs the program's own code for the start (rendezvous,
settings, sockets, preflight without its collectives, lease, load), heartbeats and saves, with real TCPStore
clients. The parent process hosts the store, as torchrun's agent does. A shard file is a sparse file that
takes a random time to "write". Figures are for each phase: its time, requests by rank and second, and the
processor time of the store. A save has in addition the time from the last file to the last rank that knows
the outcome.

torch's clients look up host names. Where no name server answers, run this in a network namespace:
`unshare -n sh -c 'ip link set lo up; exec python benchmarks/store_traffic.py'`.
"""

import argparse
import itertools
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch
import torch.distributed as dist

from benchmarks.common import RESULTS, write_result
from megatron_zpp.checkpoint import write
from megatron_zpp.checkpoint.directory import checkpoint_path
from megatron_zpp.distributed import rendezvous as meeting
from megatron_zpp.distributed.agreement import check_agreement
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.nccl_sockets import choose_nccl_sockets
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import CHUNK_BYTES, Checksums
from megatron_zpp.supervision import preflight as trial
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.heartbeat import _Pulse, heartbeat

PER_NODE = 8
TIMEOUT = timedelta(minutes=10)  # --distributed-timeout-minutes
SETTINGS = {"run": {f"setting_{number}": number for number in range(200)}}
PHASES = ("start", "heartbeats", "save", "end")
_REQUESTS = {"set", "get", "add", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set"}


class Counting:
    """A store that records the time, rank and kind of every request of this process."""

    events: ClassVar[list[tuple[float, int, str]]] = []  # of all stores; `append` is atomic
    rank = threading.local()

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def clone(self) -> "Counting":
        self._record("connect")
        return Counting(self._store.clone(), self._rank)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        if name not in _REQUESTS:
            return method

        def call(*given: Any) -> Any:
            self._record(name)
            return method(*given)

        return call

    def _record(self, kind: str) -> None:
        self.events.append((time.monotonic(), self._rank, kind))


@dataclass
class Times:
    """When the ranks of one process began and ended their phases, and had written their files."""

    began: list[tuple[str, float]] = field(default_factory=list)
    ended: list[tuple[str, float]] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


def prefix_store(name: str, store: dist.Store) -> Counting:
    """Instead of dist.PrefixStore, in the rendezvous."""
    return Counting(dist.PrefixStore(name, store), Counting.rank.value)


def run_rank(rank: int, options: argparse.Namespace, ranks: int, port: int, times: Times, wait: Any) -> None:
    """All phases of one rank; `wait` is passed by all ranks together."""
    Counting.rank.value = rank
    topology = Topology(rank, ranks, rank % PER_NODE, PER_NODE)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    generator = random.Random(rank)

    def phase(name: str) -> None:
        if times_of := [name for name, _ in own]:
            times.ended.append((times_of[-1], time.monotonic()))
            wait()
        own.append((name, time.monotonic()))
        times.began.append(own[-1])

    own: list[tuple[str, float]] = []
    wait()
    phase("start")
    time.sleep(generator.random() * options.spread)
    met = meeting.rendezvous(topology, environment, TIMEOUT, say=print, ended=print)
    with heartbeat(met.store, topology, 600, "store_traffic", lifelines=met.lifelines) as activity:
        start(met, topology, activity)
        phase("heartbeats")
        time.sleep(options.heartbeats)
        for number in range(options.saves):
            phase(f"save {number}")
            save(Path(options.directory), number, met.store, topology, generator, options, times)
        phase("end")
    times.ended.append(("end", time.monotonic()))


def start(met: meeting.Rendezvous, topology: Topology, activity: Activity) -> None:
    """What ranks exchange from the rendezvous to the first step, see joining.py and restore.py."""
    exchange = Exchange(met.store, topology, timedelta(seconds=300), "preflight")
    check_agreement(SETTINGS, exchange)
    choose_nccl_sockets("auto", "nccl", exchange, {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"})
    trial.preflight(met, torch.device("cpu"), exchange, activity, limit=300)
    for purpose, name in (("lease", "problem"), ("load", "candidates"), ("run", "name")):
        exchange = Exchange(met.store, topology, TIMEOUT, purpose)
        if topology.rank == 0:
            exchange.put(name, "x")
        exchange.get(name)
    exchange = Exchange(met.store, topology, TIMEOUT, "load/iter_0000100")
    exchange.first("problem", None)


def save(
    directory: Path,
    number: int,
    store: dist.Store,
    topology: Topology,
    generator: random.Random,
    options: argparse.Namespace,
    times: Times,
) -> None:
    """One checkpoint, whose shard file takes this rank from half of --write-seconds to all of it."""
    pause[topology.rank] = options.write_seconds * (1 + generator.random()) / 2
    tensors = {str(topology.rank): torch.zeros(1)}  # tells `write_file` the rank
    exchange = Exchange(store, topology, TIMEOUT, f"save/{number}")
    write.write_checkpoint(checkpoint_path(directory, number), tensors, {}, exchange, write.SaveOptions())


pause: dict[int, float] = {}


def writer_of(size: int, times: Times) -> Callable[..., Checksums]:
    """Instead of write_shard_file: a sparse file after a while."""
    checksums = Checksums(size, CHUNK_BYTES, ("0" * 64,) * -(-size // CHUNK_BYTES))

    def write_file(
        path: Path, tensors: dict[str, torch.Tensor], on_progress: Callable[[], None]
    ) -> Checksums:
        until = time.monotonic() + pause[int(next(iter(tensors)))]
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            on_progress()
        with path.open("wb") as file:
            file.truncate(size)
        times.written.append(time.monotonic())
        return checksums

    return write_file


def watcher(barrier: Any, results: Any) -> Callable[[_Pulse], None]:
    """Instead of the second thread of a heartbeat, which sends no requests: ends all if a rank fails."""

    def _watch(pulse: _Pulse) -> None:
        while not pulse._over.wait(1.0):
            if pulse._verdict:
                results.put(pulse._verdict)
                barrier.abort()
                os._exit(1)

    return _watch


def run_ranks(
    mine: range, options: argparse.Namespace, ranks: int, port: int, barrier: Any, results: Any
) -> None:
    """One process: a thread for each of the ranks `mine`."""
    threading.stack_size(1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    times = Times()
    meeting.dist = _With(dist, PrefixStore=prefix_store)  # type: ignore[assignment]
    trial._wrong_sums = lambda *_: 0
    trial._time_ring = lambda *_: (1e9, True)
    _Pulse._watch = watcher(barrier, results)  # type: ignore[assignment]
    write.write_shard_file = writer_of(options.shard_bytes, times)
    together = threading.Barrier(len(mine), action=barrier.wait)
    threads = [
        threading.Thread(target=run_rank, args=(rank, options, ranks, port, times, together.wait))
        for rank in mine
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((times, Counting.events))


class _With:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__ |= replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def measure(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one number of ranks."""
    context = get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    share = -(-ranks // options.processes)
    pieces = [range(1)]  # rank 0 has more to do than the others, and waits for no lock of theirs
    pieces += [range(first, min(first + share, ranks)) for first in range(1, ranks, share)]
    barrier, results = context.Barrier(len(pieces) + 1), context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=options.memory) as directory:
        options.directory = directory
        children = [
            context.Process(
                target=run_ranks, args=(piece, options, ranks, store.port, barrier, results), daemon=True
            )
            for piece in pieces
        ]
        for child in children:
            child.start()
        cpu = []
        with suppress(threading.BrokenBarrierError):
            for _ in range(3 + options.saves):  # before each phase
                barrier.wait()
                cpu.append(sum(os.times()[:2]))
        found = []
        for _ in children:
            found.append(results.get())
            if isinstance(found[-1], str):
                raise SystemExit(f"error: {found[-1]}")
        for child in children:
            child.join()
        cpu.append(sum(os.times()[:2]))
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
    return figures(ranks, options, [times for times, _ in found], [events for _, events in found], cpu)


def figures(
    ranks: int,
    options: argparse.Namespace,
    times: list[Times],
    events: list[list[tuple[float, int, str]]],
    cpu: list[float],
) -> dict[str, Any]:
    """A row for each phase."""
    requests = sorted(itertools.chain(*events))
    names = ["start", "heartbeats", *(f"save {number}" for number in range(options.saves)), "end"]
    written = sorted(itertools.chain(*(one.written for one in times)))
    rows = {}
    for index, name in enumerate(names):
        begin = min(when for one in times for which, when in one.began if which == name)
        end = max(when for one in times for which, when in one.ended if which == name)
        inside = [event for event in requests if begin <= event[0] < end]
        by_rank = Counter(rank for _, rank, _ in inside)
        row: dict[str, Any] = {
            "seconds": round(end - begin, 2),
            "requests": len(inside),
            "requests_per_second": round(len(inside) / (end - begin)),
            "most_in_one_second": most_in_one_second([when for when, _, _ in inside]),
            "requests_of_a_rank": statistics.median(by_rank[rank] for rank in range(1, ranks)),
            "requests_of_rank_0": by_rank[0],
            "store_cpu_seconds": round(cpu[index + 1] - cpu[index], 2),
            "kinds": dict(sorted(Counter(kind for _, _, kind in inside).items())),
        }
        if name.startswith("save"):
            last = max(when for when in written if begin <= when < end)
            row["seconds_after_the_last_file"] = round(end - last, 3)
        rows[name] = row
    return rows


def most_in_one_second(moments: list[float]) -> int:
    """The most of the sorted moments that any second holds."""
    most = first = 0
    for index, moment in enumerate(moments):
        while moments[first] <= moment - 1:
            first += 1
        most = max(most, index + 1 - first)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--processes", type=int, default=16, help="that the ranks are threads of")
    parser.add_argument("--spread", type=float, default=3.0, help="seconds within which ranks start")
    parser.add_argument("--heartbeats", type=float, default=10.0, help="seconds of heartbeats alone")
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--write-seconds", type=float, default=6.0, help="of the slowest shard file, at most")
    parser.add_argument("--shard-bytes", type=int, default=2 << 30, help="that a shard file claims to have")
    parser.add_argument("--memory", default="/dev/shm", help="where the sparse shard files are")
    parser.add_argument("--name", default="store_traffic", help="of the result")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    kept = {"processes", "spread", "heartbeats", "saves", "write_seconds", "shard_bytes"}
    settings = {name: value for name, value in vars(options).items() if name in kept}
    rows: dict[str, Any] = {}
    for ranks in options.ranks:
        rows[str(ranks)] = measure(ranks, options)
        write_result(options.name, {"settings": settings, "ranks": rows}, options.output)


if __name__ == "__main__":
    main()
