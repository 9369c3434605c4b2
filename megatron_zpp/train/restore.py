"""What a run starts from: the newest whole checkpoint of --load, or initial weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.checkpoint.directory import TRACKER, candidates, write_tracker
from megatron_zpp.checkpoint.exchange import Exchange
from megatron_zpp.checkpoint.read import load_checkpoint
from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import refusal
from megatron_zpp.config.root import Config
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.files import check_writable
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class Start:
    """A position, and the line that says where it comes from."""

    progress: Progress
    line: str


def check_start(config: CheckpointConfig) -> None:
    """Refuses, before anything is built, a --load to start from or a --save to write to that cannot be."""
    if config.save:
        check_writable("--save", config.save)
        if (Path(config.save) / TRACKER).is_dir():
            raise refusal("--save", config.save, f"its {TRACKER} is a directory; remove that")
    if config.load is None or candidates(config.load, config.ckpt_step):
        return
    if config.exit_on_missing_checkpoint:
        raise refusal("--load", config.load, "holds no checkpoint, and --exit-on-missing-checkpoint is given")
    if config.load != config.save:
        raise refusal(
            "--load", config.load, "holds no checkpoint; only a --load equal to --save may still be empty"
        )


def restore(
    config: Config, engine: ZeroEngine, tokenizer: dict[str, Any], store: dist.Store
) -> tuple[Progress, list[str]]:
    """Where the run starts, with lines that say so and name damaged checkpoints that it passed over.

    Raises ValueError when no checkpoint is whole: a run that has some never starts from initial weights.
    """
    settings = config.checkpoint
    passed_over: list[tuple[Path, str]] = []
    for path in _agreed_candidates(config, engine, store):
        problem, start = None, Start(Progress(), "")
        try:
            start = _load(settings, path, engine, tokenizer)
        except (DamagedFile, OSError) as damage:
            problem = one_line(damage)
        exchange = _exchange(config, engine, store, f"load/{path.name}")
        problems = [problem for problem in exchange.everyone("problem", problem) if problem]
        if not problems:
            if settings.load == settings.save and engine.topology.rank == 0:
                write_tracker(Path(settings.load))
            warnings = [f" WARNING: {path} is passed over: {problem}" for path, problem in passed_over]
            return start.progress, [*warnings, start.line]
        passed_over.append((path, problems[0]))
    if passed_over:
        raise refusal(
            "--load",
            settings.load,
            f"none of its checkpoints is whole: {passed_over[0][1]}; leave --load out to begin anew",
        )
    return Progress(), [" starting from initial weights"]


def _agreed_candidates(config: Config, engine: ZeroEngine, store: dist.Store) -> list[Path]:
    """Rank 0's, so that a file system that shows the same directory differently cannot part the ranks."""
    if config.checkpoint.load is None:
        return []
    exchange = _exchange(config, engine, store, "load")
    if engine.topology.rank == 0:
        found = candidates(config.checkpoint.load, config.checkpoint.ckpt_step)
        exchange.tell("candidates", [str(path) for path in found])
    return [Path(path) for path in exchange.hear("candidates")]


def _load(settings: CheckpointConfig, path: Path, engine: ZeroEngine, tokenizer: dict[str, Any]) -> Start:
    with_optimizer = settings.load_optim and not settings.finetune
    progress, errors_fit = load_checkpoint(path, engine, tokenizer, with_optimizer=with_optimizer)
    if settings.finetune:
        return Start(Progress(), f" loaded the weights of {path}; starting at iteration 0")
    without = "" if with_optimizer else " without the optimizer's state"
    if with_optimizer and not errors_fit:
        without = " without what error feedback had kept, which fits the same nodes, ranks and blocks alone"
    return Start(
        progress,
        f" loaded {path}{without}; going on at iteration {progress.iteration}, "
        f"{progress.consumed_samples} samples",
    )


def _exchange(config: Config, engine: ZeroEngine, store: dist.Store, purpose: str) -> Exchange:
    return Exchange(store, engine.topology, config.distributed.timeout, purpose)
