"""Memory snapshots: a run without --buddy-snapshots imports nothing of megatron_zpp/memory_snapshots."""

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_zpp.config.memory_snapshots import NAME_FILE, MemorySnapshotsConfig
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.storage.location import location
from megatron_zpp.train.setup.ranks import Ranks
from megatron_zpp.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from megatron_zpp.memory_snapshots.buddy_memory import BuddyMemory
    from megatron_zpp.memory_snapshots.held import HeldSnapshot
    from megatron_zpp.memory_snapshots.taking import MemorySnapshots


def check_memory(settings: MemorySnapshotsConfig) -> None:
    """Raise ValueError, before a device is taken, for a --buddy-directory that cannot be used."""
    if settings.buddy_snapshots is None:
        return
    from megatron_zpp.memory_snapshots.buddy_memory import check_directory

    check_directory(settings.buddy_directory)


def open_memory(config: Config, engine: ZeroEngine, ranks: Ranks) -> tuple["BuddyMemory | None", list[str]]:
    """(the memory of a run with --buddy-snapshots, lines for the log); None for other runs.

    Another run with --save forgets the memory snapshots of earlier starts, which hold later states than it
    continues. Every rank must call it. Raises ValueError as `open_buddy_memory` does.
    """
    if config.memory_snapshots.buddy_snapshots is None:
        if config.checkpoint.save is not None and ranks.topology.rank == 0:
            with suppress(OSError):
                (location(config.checkpoint.save) / NAME_FILE).unlink()
        return None, []
    from megatron_zpp.memory_snapshots.buddy_memory import open_buddy_memory

    return open_buddy_memory(
        config, engine, ranks.store, ranks.topology, address=ranks.address, master=ranks.master
    )


def held_snapshots(
    memory: "BuddyMemory | None", engine: ZeroEngine
) -> tuple[list["HeldSnapshot"], list[str]]:
    """The whole memory snapshots, and lines on those that are not whole. Every rank must call it."""
    if memory is None:
        return [], []
    from megatron_zpp.memory_snapshots.held import find_held

    return find_held(memory, engine)


def memory_snapshots(
    memory: "BuddyMemory | None",
    engine: ZeroEngine,
    config: Config,
    *,
    tokenizer: dict[str, Any],
    reporter: Reporter,
    store: dist.Store,
) -> "MemorySnapshots | None":
    """What takes the snapshots of a run; None without `memory`. `tokenizer` describes its tokenizer."""
    if memory is None:
        return None
    from megatron_zpp.memory_snapshots.taking import MemorySnapshots

    exchange_for = partial(Exchange, store, engine.topology, config.distributed.timeout)
    return MemorySnapshots(
        memory, engine, config, tokenizer=tokenizer, reporter=reporter, exchange_for=exchange_for
    )
