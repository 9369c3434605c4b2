"""Takes memory snapshots during the training: when, by which threads, and what follows if one fails."""

import platform
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.snapshot import Snapshot, writing_thread
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.exchange import Exchange, NoProgress
from megatron_zpp.memory_snapshots.buddy_memory import BuddyMemory
from megatron_zpp.memory_snapshots.copies import SnapshotName
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.zero.engine import ZeroEngine

_POLL = 0.1  # seconds between two reports to other ranks that this one waits for its writer
_NOTABLE = 0.1  # of the time between two snapshots: a longer wait is reported


class MemorySnapshots:
    """Takes a memory snapshot at the start of a run and at multiples of --buddy-snapshots.

    The training waits for a snapshot only when the next one is due: there is room for two. The earlier one is
    removed when all ranks know that the later one is whole. A snapshot that fails is a warning.
    """

    def __init__(
        self,
        memory: BuddyMemory,
        engine: ZeroEngine,
        config: Config,
        *,
        tokenizer: dict[str, Any],
        reporter: Reporter,
        exchange_for: Callable[[str], Exchange],
    ) -> None:
        """`tokenizer` describes the tokenizer; `exchange_for` makes an exchange between all ranks."""
        interval = config.memory_snapshots.buddy_snapshots
        assert interval is not None  # there is no memory without
        self._interval, self._memory, self._engine = interval, memory, engine
        self._config, self._tokenizer = config.to_json(), tokenizer
        self._reporter, self._exchange_for = reporter, exchange_for
        self._snapshot = Snapshot(self._shards())
        self._writer = writing_thread("memory", engine.device)
        self._writing: Future[str | None] | None = None  # returns the problem, if there is one
        self._newest: SnapshotName | None = None  # taken
        self._whole: SnapshotName | None = None  # the newest that is known to be whole on all ranks
        self._keys: set[str] = set()  # in the store, of the newest exchange
        self._taken = time.perf_counter()
        self._said_slow = False

    def due(self, progress: Progress) -> bool:
        """Whether a snapshot of `progress` is to be taken."""
        return self._newest is None or progress.iteration % self._interval == 0

    def take(self, progress: Progress) -> None:
        """Start to copy all states, once the snapshot before this one is done; every rank must call it."""
        name = SnapshotName(progress.iteration, self._memory.attempt)
        if name == self._newest:
            return
        self._settle_newest()
        self._newest, self._taken = name, time.perf_counter()
        self._snapshot.take(self._shards)  # first: the state waits for the device
        state = describe_state(
            self._engine, progress, with_optimizer=True, config=self._config, tokenizer=self._tokenizer
        )
        self._writing = self._writer.submit(self._write, name, state)

    def before_step(self) -> None:
        """Wait until the states are copied. Call it before they change."""
        self._snapshot.settle()

    def end(self, *, saved: bool) -> None:
        """Forget all snapshots if the run has `saved` its states, else those of this start.

        Every rank must call it.
        """
        exchange = self._exchange_for("memory/end")
        self._written(exchange)
        self._writer.shutdown()
        self._memory.close()
        exchange.first("closed", None)  # all have: nobody writes to this node now
        self._memory.forget(all_starts=saved)

    def _shards(self) -> dict[str, torch.Tensor]:
        return shards_of(self._engine, with_optimizer=True)

    def _write(self, name: SnapshotName, state: dict[str, Any]) -> str | None:
        """Write a snapshot to this node and its buddy; on the writer's thread."""
        try:
            self._memory.store(name, self._snapshot.wait(), state)
        except (OSError, ValueError) as error:
            return f"rank {self._engine.topology.rank} on {platform.node()}: {one_line(error)}"
        return None

    def _settle_newest(self) -> None:
        """Wait for the newest snapshot; keep it alone if it is whole on all ranks, else what was before."""
        if self._writing is None or self._newest is None:
            return
        began = time.perf_counter()
        if problem := self._agreed_problem(self._newest):
            self._warn(self._newest, problem)
            return
        first, self._whole = self._whole is None, self._newest
        if self._memory.by_first:
            self._memory.copies.remove_before(self._whole)
        now = time.perf_counter()
        if first:
            where = "two nodes" if self._engine.topology.nodes > 1 else "this node alone"
            self._reporter.say(f" iteration {self._whole.iteration} is in the memory of {where}")
        if now - began > _NOTABLE * (now - self._taken) and not (first or self._said_slow):
            self._said_slow = True
            self._reporter.warn(
                f"the training waited {now - began:.1f} s for the memory snapshot of iteration "
                f"{self._whole.iteration}; a --buddy-snapshots above {self._interval} leaves it more time"
            )

    def _agreed_problem(self, snapshot: SnapshotName) -> str | None:
        """On all ranks the problem of the first rank that has one. Raises ValueError if a rank is silent."""
        exchange, earlier = self._exchange_for(f"memory/{snapshot}"), self._keys
        try:
            problem = exchange.first("problem", self._written(exchange))
        except NoProgress as silence:
            fix = f"{silence}; raise --distributed-timeout-minutes if a rank is only slow"
            raise option_error("--buddy-snapshots", self._interval, fix) from None
        self._keys = exchange.keys()
        if self._engine.topology.rank == 0:  # all ranks have contributed to this exchange
            exchange.forget(earlier)
        return problem

    def _written(self, exchange: Exchange) -> str | None:
        """Wait for the writer and return its problem. All ranks wait for as long as one of them does.

        A transfer without a byte for 30 s fails, so that the wait ends.
        """
        if self._writing is None:
            return None
        while not wait([self._writing], timeout=_POLL).done:
            exchange.progress()
        problem, self._writing = self._writing.result(), None
        return problem

    def _warn(self, failed: SnapshotName, problem: str) -> None:
        if self._memory.by_first:
            self._memory.copies.remove(failed)
        newest = "none is" if self._whole is None else f"iteration {self._whole.iteration} is the newest"
        self._reporter.warn(
            f"iteration {failed.iteration} could not be copied to memory: {problem}; {newest} there; "
            "training continues"
        )
