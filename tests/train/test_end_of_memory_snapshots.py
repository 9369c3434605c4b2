"""What memory snapshots leave: no files in memory, whichever rank writes last, and no keys in the store."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.memory_snapshots.buddy_memory import BuddyMemory
from megatron_zpp.memory_snapshots.run_memory import RunMemory
from megatron_zpp.memory_snapshots.taking import MemorySnapshots
from megatron_zpp.reporting.reporter import Reporter
from tests.checkpoint.saving import FIRST, TOKENIZER
from tests.train.conftest import TINY
from tests.train.test_memory_snapshots import LENGTH, MODEL, SNAPSHOTS
from tests.zero.ranks import on_ranks
from tests.zero.test_quantized import batch
from tests.zero.zeropp_engines import build

SILENT, LATE = 2, 4  # seconds: the time-out, and how late a copy is
WARM_UP, COUNT = 3, 6
FLAGS = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "49", *TINY]
FLAGS += [*LENGTH, *MODEL, *SNAPSHOTS]


def snapshots_of(topology: Topology, directory: str, seconds: float, late: float = 0) -> MemorySnapshots:
    """Those of a run after one step; `seconds` is the time-out, and rank 1 begins to write `late`."""
    engine = build(topology, {})
    engine.accumulate(batch(topology, 0), index=0, micro_batches=1)
    engine.step(1e-2)
    config = parse_args([*FLAGS, "--save", "new", "--load", "new"])
    store = dist.distributed_c10d._get_default_store()
    exchange_for = partial(Exchange, store, topology, timedelta(seconds=seconds))
    memory = BuddyMemory(
        RunMemory(Path(directory), "0" * 16), topology, exchange_for("memory"), attempt="0" * 8, secret=""
    )
    if topology.rank == 1:
        memory.store = partial(_late, late, memory.store)  # type: ignore[method-assign]
    reporter = Reporter(config.logging, config.to_json(), topology, iterations=20, start=FIRST)
    return MemorySnapshots(
        memory, engine, config, tokenizer=TOKENIZER, reporter=reporter, exchange_for=exchange_for
    )


def _late(seconds: float, store: Any, *arguments: Any) -> None:
    time.sleep(seconds)
    store(*arguments)


def left_in_memory(topology: Topology, directory: str) -> list[str]:
    """The files that are left when a run has ended whose last copy one rank writes late."""
    snapshots = snapshots_of(topology, directory, SILENT, LATE)
    snapshots.take(FIRST)
    snapshots.end(saved=True)
    dist.barrier()
    return sorted(path.name for path in Path(directory).rglob("*") if path.is_file())


def test_memory_is_freed_after_the_slowest_rank_of_a_node(tmp_path: Path) -> None:
    """Which may write for longer than the time-out."""
    assert on_ranks(2, left_in_memory, str(tmp_path)) == [[], []]


def keys_after_each(topology: Topology, directory: str) -> list[int]:
    """The keys in the store after each snapshot."""
    snapshots, keys = snapshots_of(topology, directory, 60), []
    for number in range(1, WARM_UP + COUNT + 1):
        snapshots.take(Progress(number, number))
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    snapshots.end(saved=True)
    return keys


def test_snapshots_leave_no_keys_in_the_store(tmp_path: Path) -> None:
    for keys in on_ranks(2, keys_after_each, str(tmp_path)):
        assert keys[-1] - keys[WARM_UP - 1] < COUNT, keys  # two more if ranks waited long for the last one
