"""The start of a run: the newest whole checkpoint of --load, the weights of a GPT-2, or initial weights."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.checkpoint.directory import TRACKER, candidates, lost_newest, write_tracker
from megatron_zpp.checkpoint.huggingface.load import load_weights, open_weights
from megatron_zpp.checkpoint.read import load_checkpoint, saved_settings
from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import DamagedFile, OnProgress
from megatron_zpp.storage.files import check_writable
from megatron_zpp.train.data_changes import (
    batch_changes,
    data_changes,
    mask_changes,
    order_change,
    ordered_samples,
)
from megatron_zpp.train.model_changes import model_changes
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class Start:
    """The progress that a run starts from, and log lines that say where it was loaded from."""

    progress: Progress
    lines: list[str]


def check_start(config: CheckpointConfig, model: ModelConfig, tokenizer: dict[str, Any]) -> None:
    """Raise ValueError, before anything is built, for a --load or --save that cannot be used."""
    if config.save:
        check_writable("--save", config.save)
        if (Path(config.save) / TRACKER).is_dir():
            raise option_error("--save", config.save, f"its {TRACKER} is a directory; remove that")
    if config.load is None:
        return
    if config.huggingface:
        open_weights(config.huggingface, model, tokenizer).close()
        return
    if found := candidates(config.load, config.ckpt_step):
        _check_going_back(config, found[0])
        return
    if config.exit_on_missing_checkpoint:
        raise option_error(
            "--load", config.load, "holds no checkpoint, and --exit-on-missing-checkpoint is given"
        )
    if config.load != config.save:
        raise option_error(
            "--load", config.load, "holds no checkpoint; only a --load equal to --save may still be empty"
        )


def _saves_where_it_loads(config: CheckpointConfig) -> bool:
    if config.save is None or config.load is None:
        return False
    return os.path.realpath(config.save) == os.path.realpath(config.load)


def _check_going_back(config: CheckpointConfig, start: Path) -> None:
    """Raise ValueError if --ckpt-step goes back in --save: the next start would load the newer checkpoint."""
    if not _saves_where_it_loads(config):
        return
    assert config.load is not None  # it is equal to --save
    newest = candidates(config.load)[0]
    if newest != start:
        raise option_error(
            "--ckpt-step",
            config.ckpt_step,
            f"{newest.name} in --save {config.save} is newer, and the next start would load it; move "
            "it away, or give another --save",
        )


def restore(
    config: Config, engine: ZeroEngine, tokenizer: dict[str, Any], store: dist.Store, schedule: RunSchedule
) -> Start:
    """Where the run starts, with lines that say so and name damaged checkpoints that it skipped.

    `schedule` is that of a run which starts at iteration 0.

    Raises ValueError when no checkpoint is whole: a run that has some never starts from initial weights.
    """
    settings = config.checkpoint
    exchange_for = partial(Exchange, store, engine.topology, config.distributed.timeout)
    if settings.huggingface:
        load_weights(settings.huggingface, engine, config.model, tokenizer)
        line = f" loaded the weights of {settings.load}; starting at iteration 0"
        return Start(_named(Progress(), settings, exchange_for), [line])
    passed_over: list[tuple[Path, str]] = []
    for path in _agreed_candidates(settings, exchange_for):
        problem, start = None, Start(Progress(), [])
        exchange = exchange_for(f"load/{path.name}")
        try:
            start = _load(config, path, engine, tokenizer, schedule, exchange.progress)
        except (DamagedFile, OSError) as damage:
            problem = one_line(damage)
        problem = exchange.first("problem", problem)
        if problem is None:
            assert settings.load is not None  # it holds `path`
            directory = Path(settings.load)
            lost = None if settings.ckpt_step is not None else lost_newest(directory)
            if settings.load == settings.save and engine.topology.rank == 0:
                write_tracker(directory)
            warnings = [f" WARNING: {lost}: it is skipped"] if lost else []
            warnings += [f" WARNING: {path} is skipped: {problem}" for path, problem in passed_over]
            return Start(_named(start.progress, settings, exchange_for), [*warnings, *start.lines])
        passed_over.append((path, problem))
    if passed_over:
        raise option_error(
            "--load",
            settings.load,
            f"none of its checkpoints is whole: {passed_over[0][1]}; omit --load to start from new weights",
        )
    return Start(_named(Progress(), settings, exchange_for), [" starting from initial weights"])


def _named(progress: Progress, config: CheckpointConfig, exchange_for: Callable[[str], Exchange]) -> Progress:
    """`progress` with the name of the run: a new one unless the run resumes in the directory it saves to."""
    if progress.run and _saves_where_it_loads(config):
        return progress
    exchange = exchange_for("run")
    if exchange.topology.rank == 0:
        exchange.put("name", secrets.token_hex(4))
    return replace(progress, run=exchange.get("name"))


def _agreed_candidates(config: CheckpointConfig, exchange_for: Callable[[str], Exchange]) -> list[Path]:
    """The checkpoints that rank 0 sees, because a shared file system may show ranks different ones."""
    if config.load is None:
        return []
    exchange = exchange_for("load")
    if exchange.topology.rank == 0:
        found = candidates(config.load, config.ckpt_step)
        exchange.put("candidates", [str(path) for path in found])
    return [Path(path) for path in exchange.get("candidates")]


def _load(
    config: Config,
    path: Path,
    engine: ZeroEngine,
    tokenizer: dict[str, Any],
    schedule: RunSchedule,
    on_progress: OnProgress,
) -> Start:
    settings = config.checkpoint
    with_optimizer = settings.load_optim and not settings.finetune
    progress = load_checkpoint(
        path, engine, tokenizer, with_optimizer=with_optimizer, on_progress=on_progress
    )
    saved, ranks = saved_settings(path)
    changes = model_changes(saved, config.model)
    if settings.finetune:
        return Start(Progress(), [f" loaded the weights of {path}; starting at iteration 0", *changes])
    without = "" if with_optimizer else " without the optimizer's state"
    line = (
        f" loaded {path}{without}; resuming at iteration {progress.iteration}, "
        f"{progress.consumed_samples} samples"
    )
    if progress.dataset_progress is None:
        progress = replace(progress, dataset_progress=DatasetProgress.from_settings(saved.get("data", {})))
    present, resumed = config.to_json(), schedule.resumed(progress)
    lines = data_changes(saved, present)
    if config.data.dataset_order != "megatron":
        progress = replace(progress, ordered_samples=None)
    else:
        before = progress.ordered_samples
        progress, said = _ordered(
            progress,
            before=ordered_samples(saved, ranks) if before is None else before,
            requested=resumed.requested_samples(config.training, config.evaluation)["train"],
            samples=resumed.samples,
            same_numbers=not lines,
        )
        lines += said
    lines += mask_changes(saved, present) + batch_changes(saved, ranks, present, resumed)
    return Start(progress, [line, *changes, *lines])


def _ordered(
    progress: Progress, *, before: int, requested: int | None, samples: int, same_numbers: bool
) -> tuple[Progress, list[str]]:
    """`progress` with the number of samples to build Megatron-LM's order for, and lines for the log.

    The order depends on that number, and another number would skip some samples and repeat others. So the
    run keeps the number `before` that it began with if that covers all `samples` that it reads until its
    end. `requested` is the number that the present flags ask for.
    """
    if same_numbers and samples <= before:
        return replace(progress, ordered_samples=before), []
    assert requested is not None  # training has a length
    now = max(requested, samples)
    return replace(progress, ordered_samples=now), [order_change(before, now)] if same_numbers else []
