"""When a run saves, how a save is written, and what follows if it fails."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_name, committed, remove_old
from megatron_zpp.checkpoint.snapshot import Snapshot
from megatron_zpp.checkpoint.states import Progress, describe_state, shards_of
from megatron_zpp.checkpoint.write import SaveFailed, SaveOptions, write_checkpoint
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.storage.lease import Lease
from megatron_zpp.storage.object_path import location
from megatron_zpp.zero.engine import ZeroEngine


class Saver:
    """Writes checkpoints of all ranks: while the ranks wait, or with --async-save during training.

    A failed save is a warning and training continues, because earlier checkpoints are whole. Only `finish`
    raises an error, if the newest state at the end of a run could not be saved.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        config: Config,
        *,
        tokenizer: dict[str, Any],
        tokenizer_files: Mapping[str, bytes],
        reporter: Reporter,
        store: dist.Store,
        start: Progress,
        lease: Lease | None = None,
    ) -> None:
        """`tokenizer` describes the tokenizer, whose files are `tokenizer_files`.

        `start` is the progress from which this process trains.

        `lease` is that of --save; it is checked before a checkpoint is begun and before it is committed.
        """
        self._engine, self._tokenizer, self._reporter, self._store = engine, tokenizer, reporter, store
        self._tokenizer_files = tokenizer_files
        self._settings, self._saved_config = config.checkpoint, config.to_json()
        self._options = SaveOptions(
            read_back=config.checkpoint.keep_last is not None,
            may_write=lease.check if lease is not None else lambda: None,
        )
        self._timeout = config.distributed.timeout
        self._newest = start if config.checkpoint.save == config.checkpoint.load else None
        self._saves = 0
        self._failure: SaveFailed | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._writing: Future[str] | None = None
        self._snapshot: Snapshot | None = None
        if config.checkpoint.async_save:
            self._snapshot = Snapshot(self._shards())

    def due(self, progress: Progress) -> bool:
        """Whether `progress` is at a multiple of --save-interval."""
        interval = self._settings.save_interval
        return interval is not None and interval > 0 and progress.iteration % interval == 0

    def save(self, progress: Progress) -> None:
        """Save at `progress`, or start to. Does nothing without --save or if `progress` is already saved.

        Waits for the previous save, so that at most one is in progress.
        """
        self._wait()  # first: all ranks must agree on whether the newest save succeeded
        if self._settings.save is None or progress == self._newest:
            return
        self._newest = progress
        shards = self._shards()
        state = describe_state(
            self._engine,
            progress,
            with_optimizer=self._settings.save_optim,
            config=self._saved_config,
            tokenizer=self._tokenizer,
        )
        if self._snapshot is None:
            self._report(lambda: self._write(progress, shards, state))
            return
        snapshot = self._snapshot
        snapshot.take(shards)
        self._writing = self._writer.submit(lambda: self._write(progress, snapshot.wait(), state))

    def before_step(self) -> None:
        """Wait until the states being saved are copied. Call it before the states change."""
        if self._snapshot is not None:
            self._snapshot.settle()

    def after_step(self) -> None:
        """Log the result of an asynchronous save once it is done."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def finish(self) -> None:
        """Wait for the save in progress. Raises SaveFailed if the last save failed."""
        self._wait()
        self._writer.shutdown()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Wait for the save in progress; its failure is only a warning."""
        self._wait()
        self._writer.shutdown()

    def _shards(self) -> dict[str, Tensor]:
        return shards_of(self._engine, with_optimizer=self._settings.save_optim)

    def _write(self, progress: Progress, tensors: dict[str, Tensor], state: dict[str, Any]) -> str:
        """Write one checkpoint from all ranks and return the log line; on any thread."""
        started = time.perf_counter()
        settings = self._settings
        assert settings.save is not None
        directory = location(settings.save)
        exchange = Exchange(self._store, self._engine.topology, self._timeout, f"save/{self._saves}")
        self._saves += 1
        path = directory / checkpoint_name(progress.iteration)
        write_checkpoint(path, tensors, state, exchange, self._options, beside=self._tokenizer_files)
        line = f" saved {path} in {time.perf_counter() - started:.1f} s"
        if settings.keep_last is not None and self._engine.topology.rank == 0:
            try:
                remove_old(directory, settings.keep_last, settings.keep_every, newest=path)
            except OSError as error:  # the new checkpoint is whole, so the run continues
                line += f"; WARNING: old ones could not be removed: {error}"
        return line

    def _wait(self) -> None:
        if self._writing is not None:
            self._report(self._writing.result)
            self._writing = None

    def _report(self, outcome: Any) -> None:
        try:
            self._reporter.say(outcome())
            self._failure = None
        except SaveFailed as failure:
            self._failure, self._newest = failure, None
            self._reporter.warn(
                f"a checkpoint could not be saved: {failure}; {self._kept()}; training continues"
            )

    def _kept(self) -> str:
        """Which earlier checkpoint there is, in words."""
        assert self._settings.save is not None
        if self._engine.topology.rank != 0:
            return ""  # rank 0 alone says it
        try:
            newest = next(iter(committed(location(self._settings.save))), None)
        except OSError:  # an object store that does not answer
            return "earlier checkpoints are unchanged"
        return "there is no checkpoint yet" if newest is None else f"iteration {newest} is the newest"
