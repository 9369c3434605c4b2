"""When a run saves, how a save is written, and what follows if it fails."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.directory import checkpoint_name, remove_old
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.snapshot import Snapshot, writing_thread
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.checkpoint.together import NotReadBack, read_back
from megatron_zpp.checkpoint.write import SaveFailed, write_checkpoint
from megatron_zpp.distributed.exchange import Exchange, NoProgress
from megatron_zpp.storage.checksums import OnProgress
from megatron_zpp.storage.location import Location, location
from megatron_zpp.storage.sidecar import SidecarDigest
from megatron_zpp.train.run import Run


class Saver:
    """Writes checkpoints of all ranks: while the ranks wait, or with --async-save during training.

    With --keep-last, a committed checkpoint is read back during training, and older ones are removed after
    that, unless the new one is damaged. A failed save is a warning, at the next step, because earlier
    checkpoints are whole and training continues. `finish` raises it instead, if the newest state at the end
    of a run could not be saved, or not be read back.
    """

    def __init__(self, run: Run) -> None:
        """The lease of --save is checked before a checkpoint is begun and before it is committed."""
        config, lease = run.config, run.ranks.lease
        assert config.checkpoint.save is not None  # the loop makes no Saver without
        self._directory = location(config.checkpoint.save)
        self._engine, self._reporter = run.engine, run.reporter
        self._tokenizer, self._tokenizer_files = run.tokenizer, run.tokenizer_files
        self._settings, self._saved_config = config.checkpoint, config.to_json()
        self._may_write = lease.check if lease is not None else lambda: None
        self._files = FileWorker()
        topology, timeout = run.engine.topology, config.distributed.timeout
        self._exchange = partial(Exchange, run.ranks.store, topology, timeout)
        self._shards = partial(shards_of, run.engine, with_optimizer=config.checkpoint.save_optim)
        self._newest = run.start if config.checkpoint.saves_where_it_loads else None
        self._saves = 0
        self._written: tuple[Location, SidecarDigest] | None = None  # the newest save, if it is committed
        self._kept = "earlier checkpoints are unchanged"  # in a warning: what a start would load
        self._keys: set[str] = set()  # this rank's, of saves that other ranks may not have ended yet
        self._failure: SaveFailed | None = None
        self._warning = ""  # of the last failure, until it is said
        self._writer = writing_thread("save", run.engine.device)
        self._behind: deque[Future[str | None]] = deque()  # work beside the training; their log lines
        self._snapshot: Snapshot | None = None
        if config.checkpoint.async_save:
            self._snapshot = Snapshot(self._shards())

    def due(self, progress: Progress) -> bool:
        """Whether `progress` is at a multiple of --save-interval."""
        interval = self._settings.save_interval
        return interval is not None and interval > 0 and progress.iteration % interval == 0

    def save(self, progress: Progress) -> None:
        """Save at `progress`, or start to. Does nothing if `progress` is already saved.

        Waits for the previous save, so that at most one is in progress.
        """
        self._wait()  # first: all ranks must agree on whether the newest save succeeded
        if progress == self._newest:
            return
        self._newest, self._failure = progress, None
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot.take(self._shards)  # first: the state waits for the device
        state = describe_state(
            self._engine,
            progress,
            with_optimizer=self._settings.save_optim,
            config=self._saved_config,
            tokenizer=self._tokenizer,
        )
        path = self._directory / checkpoint_name(progress.iteration)
        self._saves += 1
        self._written = None
        if snapshot is None:
            self._report(lambda: self._write(path, self._shards(), state))
        else:
            self._behind.append(self._writer.submit(lambda: self._write(path, snapshot.wait(), state)))
        if self._settings.keep_last is not None:
            self._behind.append(self._writer.submit(self._keep_last, self._settings.keep_last))

    def before_step(self) -> None:
        """Warn of a failed save, and wait until the states being saved are copied.

        Call it before the states change.
        """
        self._warn()
        if self._snapshot is not None:
            self._snapshot.settle()

    def after_step(self) -> None:
        """Log the results of what is done beside the training."""
        while self._behind and self._behind[0].done():
            self._report(self._behind.popleft().result)

    def finish(self) -> None:
        """Wait for the work in progress. Raises SaveFailed if the last save failed."""
        self._wait()
        self._writer.shutdown()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Wait for the work in progress; a failure is only a warning."""
        self._wait()
        self._warn()
        self._writer.shutdown()

    def _write(self, path: Location, tensors: dict[str, Tensor], state: dict[str, Any]) -> str:
        """Write one checkpoint from all ranks and return the log line; on any thread."""
        started, exchange = time.perf_counter(), self._exchange(f"save/{self._saves}")
        earlier = frozenset(self._keys)
        try:
            self._written = write_checkpoint(
                path,
                tensors,
                state,
                exchange,
                self._files,
                may_write=self._may_write,
                beside=self._tokenizer_files,
            )
        finally:
            self._keys |= exchange.keys()
        self._kept = f"iteration {state['progress']['iteration']} is the newest"
        exchange.forget(earlier)  # all ranks have contributed to this save
        self._keys -= earlier
        return f" saved {self._written[0]} in {time.perf_counter() - started:.1f} s"

    def _keep_last(self, keep_last: int) -> str | None:
        """Read the new checkpoint back, remove old ones on rank 0, and return the log line; on any thread."""
        if self._written is None:  # the save failed
            return None
        path, digest = self._written
        started, exchange = time.perf_counter(), self._exchange(f"read-back/{self._saves}")
        try:
            read_back(path, digest, exchange, self._files)
            line = f" read back {path} in {time.perf_counter() - started:.1f} s"
            if self._engine.topology.rank == 0:
                line += self._remove_old(path, keep_last, exchange)
                exchange.put("removed", None)
            else:  # for as long as rank 0 makes progress, so that no rank awaits it in vain in the next save
                with suppress(NoProgress):
                    exchange.get("removed")
        finally:
            self._keys |= exchange.keys()
        return line

    def _remove_old(self, newest: Location, keep_last: int, exchange: Exchange) -> str:
        """Remove old checkpoints; returns what the log line says of it."""
        keep_every = self._settings.keep_every

        def remove(on_progress: OnProgress) -> None:
            self._may_write()
            remove_old(newest.parent, keep_last, keep_every, newest=newest, on_progress=on_progress)

        try:
            self._files.run(remove, exchange)
        except OSError as error:  # the new checkpoint is whole, so the run continues
            return f"; WARNING: old ones could not be removed: {error}"
        return ""

    def _wait(self) -> None:
        while self._behind:
            self._report(self._behind.popleft().result)

    def _report(self, outcome: Callable[[], str | None]) -> None:
        try:
            line = outcome()
        except SaveFailed as failure:
            self._failure, self._newest = failure, None
            what = "a checkpoint could not be saved"
            if isinstance(failure, NotReadBack):
                what, self._kept = "the newest checkpoint could not be read back", "older ones are kept"
            self._warning = f"{what}: {failure}; {self._kept}; training continues"
            return
        if line is not None:
            self._warn()
            self._reporter.say(line)

    def _warn(self) -> None:
        if self._warning:
            self._reporter.warn(self._warning)
            self._warning = ""
