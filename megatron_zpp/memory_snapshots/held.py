"""At the start of a run: which memory snapshots are whole, and bringing one to the ranks that read it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.unit_entries import describe_units
from megatron_zpp.config.command_line import one_line
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.rendezvous import ranges
from megatron_zpp.memory_snapshots.buddy_memory import BuddyMemory
from megatron_zpp.memory_snapshots.copies import SnapshotName, layout_of
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class HeldSnapshot:
    """A memory snapshot of which each rank's copy is on some node.

    `holders` are these nodes, by rank, and `sizes` the bytes of the copies. `only_own`: each rank reads its
    own copy alone. Otherwise, at stage 0 and on another grid than that of the snapshot, each node needs the
    copies of all ranks.
    """

    name: SnapshotName
    holders: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    only_own: bool

    def __str__(self) -> str:
        return f"iteration {self.name.iteration} in memory"

    def bring(self, memory: BuddyMemory, exchange: Exchange) -> Path:
        """Fetch what this node lacks; return a checkpoint of what this rank reads. Every rank must call it.

        Raises DamagedFile, on all ranks if a copy cannot be fetched; NoProgress or Abandoned if a rank is
        silent.
        """
        topology = memory.topology
        node, needed = topology.node_of(topology.rank), range(len(self.holders))
        if self.only_own:
            needed = topology.node_ranks
        missing = [rank for rank in needed if node not in self.holders[rank]]
        problem = None
        try:
            memory.check_room(sum(self.sizes[rank] for rank in missing))
            for rank in missing[topology.local_rank :: topology.local_world_size]:
                memory.fetch(self.name, rank, self.holders[rank][0], exchange.progress)
        except OSError as error:
            problem = f"a copy cannot be fetched: {one_line(error)}"
        if problem := exchange.first("fetched", problem):  # and all copies are on this node now
            raise DamagedFile(problem)
        read = [topology.rank] if self.only_own else needed
        memory.copies.assemble(self.name, read, memory.assembled())
        return memory.assembled()


def find_held(memory: BuddyMemory, engine: ZeroEngine) -> tuple[list[HeldSnapshot], list[str]]:
    """The whole memory snapshots, and lines on those that are not whole. Every rank must call it."""
    copies, problems = memory.copies.found() if memory.by_first else ({}, [])
    report = [[[*name], [[*copy] for copy in found]] for name, found in copies.items()]
    topology = engine.topology
    combination = partial(_whole, local=topology.local_world_size)
    whole, lines = memory.exchange.combine("copies", [report, problems], combination)
    present = layout_of(
        {
            "ranks": topology.world_size,
            "nodes": topology.nodes,
            "tensor": engine.grid.tensor,
            "units": describe_units(engine),
        }
    )
    sharded = not any(unit.whole for unit in engine.units)
    held = [
        HeldSnapshot(
            SnapshotName.checked(*name),
            tuple(map(tuple, holders)),
            tuple(sizes),
            sharded and layout == present,
        )
        for name, layout, holders, sizes in whole
    ]
    return held, lines


def _whole(reports: list[Any], local: int) -> list[Any]:
    """On rank 0: [name, layout, holders, sizes] of each snapshot with all copies, and lines on others.

    The first of the `local` ranks of a node reports what the node has.
    """
    layouts: dict[SnapshotName, tuple[int, str]] = {}
    holders: dict[SnapshotName, dict[int, list[int]]] = {}
    sizes: dict[SnapshotName, dict[int, int]] = {}
    for node, (copies, _) in enumerate(reports[::local]):
        for name, found in copies:
            snapshot = SnapshotName(*name)
            for rank, nbytes, ranks, layout in found:
                sizes.setdefault(snapshot, {})[rank] = nbytes
                layouts.setdefault(snapshot, (ranks, layout))
                holders.setdefault(snapshot, {}).setdefault(rank, []).append(node)
    whole, lines = [], [f" WARNING: {problem}" for _, problems in reports for problem in problems]
    for snapshot, (ranks, layout) in sorted(layouts.items(), reverse=True):
        held = holders[snapshot]
        missing = [rank for rank in range(ranks) if rank not in held]
        if missing:
            which = f"rank{'s' * (len(missing) > 1)} {ranges(missing)} of {ranks}"
            lines.append(f" iteration {snapshot.iteration} in memory lacks the copies of {which}")
        else:
            in_order = [[one[rank] for rank in range(ranks)] for one in (held, sizes[snapshot])]
            whole.append([[*snapshot], layout, *in_order])
    return [whole, lines]
