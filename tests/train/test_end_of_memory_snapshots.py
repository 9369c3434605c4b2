"""A run with --buddy-snapshots frees the memory of each node at its end, whichever rank writes last."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.storage.run_memory import RunMemory
from megatron_zpp.train.buddy_memory import BuddyMemory
from megatron_zpp.train.buddy_snapshots import MemorySnapshots
from tests.checkpoint.saving import FIRST, TOKENIZER
from tests.train.conftest import TINY
from tests.train.test_memory_snapshots import LENGTH, MODEL, SNAPSHOTS
from tests.zero.ranks import on_ranks
from tests.zero.test_quantized import batch
from tests.zero.zeropp_engines import build

LATE = 2  # seconds


def left_in_memory(topology: Topology, directory: str, sums_return_at_once: bool = False) -> list[str]:
    """The files that are left when a run has ended whose last copy one rank writes late."""
    engine = build(topology, {})
    engine.accumulate(batch(topology, 0), index=0, micro_batches=1)
    engine.step(1e-2)
    if sums_return_at_once:
        engine.sum_over_ranks = _own  # type: ignore[method-assign]
    config = parse_args([*FLAGS, "--save", "new", "--load", "new"])
    store = dist.distributed_c10d._get_default_store()
    exchange_for = partial(Exchange, store, topology, timedelta(seconds=60))
    memory = BuddyMemory(
        RunMemory(Path(directory), "0" * 16), topology, exchange_for("memory"), attempt="0" * 8, secret=""
    )
    reporter = Reporter(
        config.logging, config.to_json(), topology, iterations=20, start=FIRST, device=engine.device
    )
    snapshots = MemorySnapshots(
        memory, engine, config, tokenizer=TOKENIZER, reporter=reporter, exchange_for=exchange_for
    )
    if topology.rank == 1:
        memory.store = partial(_late, memory.store)  # type: ignore[method-assign]
    snapshots.take(FIRST)
    snapshots.end(saved=True)
    dist.barrier()
    engine.close()
    return sorted(path.name for path in Path(directory).rglob("*") if path.is_file())


FLAGS = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "49", *TINY]
FLAGS += [*LENGTH, *MODEL, *SNAPSHOTS]


def _own(value: Tensor) -> Tensor:
    return value


def _late(store: Any, *arguments: Any) -> None:
    time.sleep(LATE)
    store(*arguments)


@pytest.mark.parametrize("at_once", [False, True])
def test_memory_is_freed_after_the_slowest_rank_of_a_node(tmp_path: Path, at_once: bool) -> None:
    """A sum over ranks returns at once with NCCL, which makes the device wait and not the host."""
    assert on_ranks(2, left_in_memory, str(tmp_path), at_once) == [[], []]
