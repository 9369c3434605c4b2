"""When a run saves, and what it starts from."""

import time
from typing import Any

from megatron_zpp.checkpoint.store import (
    Progress,
    find_checkpoint,
    keeps_errors,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from megatron_zpp.config.options import refusal
from megatron_zpp.config.root import Config
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.storage.files import check_writable
from megatron_zpp.train.reporter import Reporter
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.process_group import barrier


class Saver:
    """Writes checkpoints on rank 0 while the other ranks wait."""

    def __init__(
        self,
        engine: ZeroEngine,
        config: Config,
        tokenizer: dict[str, Any],
        reporter: Reporter,
        start: Progress,
    ) -> None:
        self._engine, self._tokenizer, self._reporter = engine, tokenizer, reporter
        self._checkpoint, self._saved_config = config.checkpoint, config.to_json()
        self._newest = start if config.checkpoint.save == config.checkpoint.load else None

    def due(self, progress: Progress) -> bool:
        """Whether --save-interval ends here."""
        interval = self._checkpoint.save_interval
        return bool(interval) and progress.iteration % interval == 0

    def save(self, progress: Progress) -> None:
        """Saves `progress` unless --save is not given or it is saved already."""
        if self._checkpoint.save is None or progress == self._newest:
            return
        started = time.perf_counter()
        path = save_checkpoint(
            self._checkpoint.save,
            self._engine,
            progress,
            config=self._saved_config,
            tokenizer=self._tokenizer,
            with_optimizer=self._checkpoint.save_optim,
        )
        barrier(self._engine.topology)
        self._reporter.say(f" saved {path} in {time.perf_counter() - started:.1f} s")
        self._newest = progress


def check_start(config: CheckpointConfig) -> None:
    """Refuses, before anything is built, a --load to start from or a --save to write to that cannot be."""
    if config.save:
        check_writable("--save", config.save)
    if config.load is None or find_checkpoint(config.load, config.ckpt_step) is not None:
        return
    if config.exit_on_missing_checkpoint:
        raise refusal("--load", config.load, "holds no checkpoint, and --exit-on-missing-checkpoint is given")
    if config.load != config.save:
        raise refusal(
            "--load", config.load, "holds no checkpoint; only a --load equal to --save may still be empty"
        )


def restore(config: CheckpointConfig, engine: ZeroEngine, tokenizer: dict[str, Any]) -> tuple[Progress, str]:
    """Where the run starts, with a line that says so."""
    checkpoint = find_checkpoint(config.load, config.ckpt_step) if config.load else None
    if checkpoint is None:
        return Progress(), " starting from initial weights"
    with_optimizer = config.load_optim and not config.finetune
    progress = load_checkpoint(checkpoint, engine, tokenizer, with_optimizer=with_optimizer)
    if config.finetune:
        return Progress(), f" loaded the weights of {checkpoint}; starting at iteration 0"
    without = "" if with_optimizer else " without the optimizer's state"
    if with_optimizer and engine.feeds_back and not keeps_errors(read_state(checkpoint), engine):
        without = " without what error feedback had kept, which fits the same nodes, ranks and blocks alone"
    return progress, (
        f" loaded {checkpoint}{without}; going on at iteration {progress.iteration}, "
        f"{progress.consumed_samples} samples"
    )
