"""The memory of this rank's node and of its buddy node, in which a run with --buddy-snapshots keeps copies.

The buddy node of node k is node k + 1; rank p of one sends to rank p of the other. On one node there is only
the node's own memory. A run is recognised after a restart by what memory_snapshots/name.py writes to --save.
"""

import platform
import secrets
import shutil
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from megatron_zpp.checkpoint.states import shards_of
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.memory_snapshots import MemorySnapshotsConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.job_store import JobStore, derived
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.memory_snapshots.copies import MemoryCopies, SnapshotName, file_names
from megatron_zpp.memory_snapshots.name import checked_name, memory_name, write_memory_name
from megatron_zpp.memory_snapshots.peer_files import FileServer, Peer, get_file, put_file
from megatron_zpp.memory_snapshots.run_memory import (
    RunMemory,
    available_memory,
    room_for,
    size_of,
    snapshots_root,
)
from megatron_zpp.plan.memory_snapshots import COPIES, node_bytes, pinned_bytes
from megatron_zpp.storage.checksums import DamagedFile, OnProgress
from megatron_zpp.zero.engine import ZeroEngine


class BuddyMemory:
    """Writes copies of this rank's states, sends them to the buddy node, and fetches them after a restart."""

    def __init__(
        self,
        memory: RunMemory,
        topology: Topology,
        exchange: Exchange,
        *,
        attempt: str,
        secret: str,
    ) -> None:
        """`attempt` names this start of the run; `secret` is known to its ranks alone, "" for a single one.

        `exchange` is between all ranks. It is kept until the run is restored, because its connections count.
        """
        self._memory, self.topology, self.attempt, self._secret = memory, topology, attempt, secret
        self._exchange: Exchange | None = exchange
        self.copies = MemoryCopies(memory.path, topology.node_of(topology.rank))
        self._server: FileServer | None = None
        self._master = "127.0.0.1"
        self._buddy: Peer | None = None
        if self.by_first:
            for left in memory.path.glob("restoring_*"):  # by a start that was killed
                shutil.rmtree(left, ignore_errors=True)

    @property
    def by_first(self) -> bool:
        """Whether this rank is the one of its node that removes files."""
        return self.topology.local_rank == 0

    @property
    def exchange(self) -> Exchange:
        """Between all ranks, until `restored`."""
        assert self._exchange is not None, "the run is restored"
        return self._exchange

    def serve(self, address: str, master: str) -> None:
        """Let other nodes reach this rank at `address`; `Ranks` describes both. Raises OSError."""
        self._master = master
        self._server = FileServer(self._secret, self.copies.path, self.copies.find)
        self.exchange.put(f"server/{self.topology.rank}", [address, self._server.port])

    def find_buddy(self) -> None:
        """Find out where the buddy node is reached, once all ranks serve."""
        following = self.topology.rank + self.topology.local_world_size
        self._buddy = self._peer(following % self.topology.world_size)

    def store(self, snapshot: SnapshotName, tensors: dict, state: dict) -> None:
        """Write this rank's copy here and on the buddy node; on any thread. Raises OSError."""
        self.copies.write(snapshot, self.topology.rank, tensors, state)
        if self._buddy is not None:
            for name in file_names(snapshot, self.topology.rank):
                put_file(self._buddy, self.copies.path / name, name)

    def fetch(self, snapshot: SnapshotName, rank: int, node: int, on_progress: OnProgress) -> None:
        """Bring the copy of `rank` from a node to this one. Raises OSError."""
        server = self._peer(node * self.topology.local_world_size + rank % self.topology.local_world_size)
        for name in file_names(snapshot, rank):
            target = self.copies.path / name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            get_file(server, name, target, on_progress)

    def check_room(self, nbytes: int) -> None:
        """Raise OSError if this node has no room for so many more bytes."""
        room = room_for(self._memory.path.parent, None)
        if nbytes > room:
            raise OSError(f"needs {nbytes / 2**30:.3f} GiB, and {room / 2**30:.3f} GiB are left")

    def restored(self, snapshot: SnapshotName | None) -> None:
        """Keep, of earlier starts, only the snapshot that all ranks have loaded; None: none."""
        self._exchange = None
        shutil.rmtree(self.assembled(), ignore_errors=True)
        if self.by_first:
            self.copies.remove_earlier_starts(self.attempt, kept=snapshot)

    def assembled(self) -> Path:
        """Where this rank makes a checkpoint of copies."""
        return self.copies.path.parent / f"restoring_{self.topology.rank}"

    def close(self) -> None:
        """Stop serving other nodes."""
        if self._server is not None:
            self._server.close()

    def forget(self, *, all_starts: bool) -> None:
        """Remove the snapshots of all starts of the run, or of this one; after all ranks have closed."""
        if self.by_first and all_starts:
            self._memory.remove()
        elif self.by_first:
            self.copies.remove_start(self.attempt)
        self._memory.close()

    def _peer(self, rank: int) -> Peer:
        host, port = self.exchange.get(f"server/{rank}")
        if ip_address(host).is_loopback:  # that rank is on the host of rank 0, which knows its name as this
            host = self._master
        return Peer(host, port, self._secret)


def check_directory(directory: str) -> None:
    """Raise ValueError for a --buddy-directory that cannot be used."""
    try:
        snapshots_root(directory)
    except ValueError as error:
        raise option_error("--buddy-directory", directory, str(error)) from None


def open_buddy_memory(
    config: Config,
    engine: ZeroEngine,
    store: dist.Store,
    topology: Topology,
    *,
    address: str,
    master: str,
) -> tuple[BuddyMemory | None, list[str]]:
    """(the memory of a run with --buddy-snapshots, lines for the log); `address`, `master`: see `serve`.

    Every rank must call it. Raises ValueError on all ranks if a node has no directory in memory, or too
    little room in it, or if the file that says where the run's copies are is damaged.
    """
    settings, save = config.memory_snapshots, config.checkpoint.save
    assert save is not None  # the configuration requires it
    exchange = Exchange(store, topology, config.distributed.timeout, "memory")
    if topology.rank == 0:
        found: tuple[str | None, list[str]] = (None, [])
        problem = None
        try:
            found = memory_name(save)
        except (DamagedFile, OSError) as error:
            problem = str(option_error("--save", save, one_line(error)))
        exchange.put("names", [found, problem, secrets.token_hex(4)])
    (name, lines), problem, attempt = exchange.get("names")
    if problem is not None:
        raise ValueError(problem)
    name, attempt = name and checked_name(name), SnapshotName.checked(0, attempt).attempt
    shards = shards_of(engine, with_optimizer=True).values()
    pinned = pinned_bytes(shard.nbytes for shard in shards if shard.is_cuda)
    copied = pinned + sum(shard.nbytes for shard in shards if not shard.is_cuda)
    agree = partial(_agree, exchange, settings)
    problem = None
    try:
        root = snapshots_root(settings.buddy_directory)
        owned, copies = sum(shard.nbytes for shard in shards), 2 if config.checkpoint.async_save else 1
        problem = _lack_of_room(root, name, topology, owned, copies * copied)
    except (OSError, ValueError) as error:
        problem = one_line(error)
    agree("room", problem)
    if topology.rank == 0:
        exchange.put("name", write_memory_name(save, name))
    name = checked_name(exchange.get("name"))
    memory, problem = None, None
    try:
        secret = derived(store.key, "snapshots").hex() if isinstance(store, JobStore) else ""
        memory = BuddyMemory(RunMemory(root, name), topology, exchange, attempt=attempt, secret=secret)
        if topology.nodes > 1:
            memory.serve(address, master)
    except OSError as error:
        problem = one_line(error)
    agree("open", problem)
    if memory is not None and topology.nodes > 1:
        memory.find_buddy()
    return memory, lines


def _agree(exchange: Exchange, settings: MemorySnapshotsConfig, name: str, problem: str | None) -> None:
    """Raise the same ValueError on all ranks if one of them has a problem."""
    if problem is not None:
        problem = f"{problem} [{platform.node()} rank {exchange.topology.rank}]"
        problem = str(option_error("--buddy-directory", settings.buddy_directory, problem))
    if found := exchange.first(name, problem):
        raise ValueError(found)


def _lack_of_room(root: Path, name: str | None, topology: Topology, owned: int, process: int) -> str | None:
    """What this node lacks if each rank has `owned` bytes of states, and copies of `process` bytes."""
    needed, room = node_bytes(owned, topology.nodes, topology.local_world_size), room_for(root, name)
    held = f"{COPIES} copies of the states of {'two nodes' if topology.nodes > 1 else 'the node'}"
    if needed > room:
        return (
            f"--buddy-snapshots needs {needed / 2**30:.3f} GiB there on each node, {held}, and "
            f"{room / 2**30:.3f} GiB are left; make it larger (mount -o remount,size=…; docker run "
            "--shm-size), or use more nodes"
        )
    needed, room = needed + topology.local_world_size * process, available_memory() + size_of(root, name)
    if needed > room:
        return (
            f"--buddy-snapshots needs {needed / 2**30:.3f} GiB of each node's memory, {held} and those of "
            f"its ranks, and {room / 2**30:.3f} GiB are left; use more nodes"
        )
    return None
