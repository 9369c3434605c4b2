"""The start of a run: the newest checkpoint that is whole, or new weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_zpp.checkpoint.directory import lost_newest, older_named, write_tracker
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.load import load_checkpoint, saved_settings
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.together import bounded, load_newest
from megatron_zpp.config.root import Config
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import OnProgress
from megatron_zpp.storage.location import Location, location
from megatron_zpp.train.resume.changes import (
    batch_changes,
    model_changes,
    numbering_changes,
    order_change,
    ordered_samples,
    rate_change,
    residual_changes,
    row_scaling_changes,
    setting_changes,
)
from megatron_zpp.train.resume.start import Start
from megatron_zpp.train.schedule.run_schedule import RunSchedule
from megatron_zpp.zero.engine import ZeroEngine


def restore(
    config: Config, engine: ZeroEngine, tokenizer: dict[str, Any], store: dist.Store, schedule: RunSchedule
) -> Start:
    """Where the run starts, with lines that say so and name what is damaged and was skipped.

    `schedule` is that of a run which starts at iteration 0.

    Raises ValueError when no checkpoint is whole: a run that has some never starts from initial weights.
    """
    settings, files = config.checkpoint, FileWorker()
    exchange_for = partial(Exchange, store, engine.topology, config.distributed.timeout)
    if settings.huggingface:
        from megatron_zpp.checkpoint.huggingface.importing import load_weights

        load_weights(settings.huggingface, engine, config.model, tokenizer)
        line = f" loaded the weights of {settings.load}; starting at iteration 0"
        return Start(lines=[line])
    assert settings.load is not None  # a run without starts from new weights
    load = partial(_load, config, engine, tokenizer, schedule)
    found = load_newest(settings.load, settings.ckpt_step, load, exchange_for, files)
    if found is None:
        return Start()
    exchange = exchange_for("load/warnings")
    with bounded(exchange, "--load", settings.load):
        if engine.topology.rank == 0:
            exchange.put("warnings", files.run(partial(_directory_warnings, settings, found.path), exchange))
        warnings = exchange.get("warnings")
    warnings += [f" WARNING: {path} is skipped: {problem}" for path, problem in found.passed_over]
    return replace(found.loaded, lines=[*warnings, *found.loaded.lines])


def _directory_warnings(config: CheckpointConfig, loaded: Location, on_progress: OnProgress) -> list[str]:
    """On rank 0: correct the tracker; lines on what it named and was not `loaded`. Raises OSError."""
    assert config.load is not None  # it holds what was loaded
    directory = location(config.load)
    lost = older = None
    if config.ckpt_step is None:
        lost, older = lost_newest(directory), older_named(directory, loaded)
    if config.saves_where_it_loads:
        write_tracker(directory)
    if lost:
        return [f" WARNING: {lost}: it is skipped"]
    return [f" WARNING: {older}"] if older else []


def _load(
    config: Config,
    engine: ZeroEngine,
    tokenizer: dict[str, Any],
    schedule: RunSchedule,
    path: Location,
    on_progress: OnProgress,
) -> Start:
    """Load the checkpoint at `path` on this rank, on a thread of its own."""
    settings = config.checkpoint
    with_optimizer = settings.load_optim and not settings.finetune
    progress = load_checkpoint(
        path, engine, tokenizer, with_optimizer=with_optimizer, on_progress=on_progress
    )
    (saved, ranks, kinds), present = saved_settings(path), config.to_json()
    changes = model_changes(saved, config.model)
    if settings.finetune:
        engine.iteration = 0  # the signs of rotated gradients and the first 4-bit iterations are a new run's
        return Start(Progress(), [f" loaded the weights of {path}; starting at iteration 0", *changes])
    if progress.iteration:  # otherwise the weights are imported, and no products were computed
        if with_optimizer and config.optimizer.optimizer != saved["optimizer"].get("optimizer", "adam"):
            changes += [" WARNING: the checkpoint is AdamW's: the momentum of Muon's matrices begins at zero"]
        if with_optimizer:
            changes += residual_changes(kinds, engine.states.kinds)
            changes += row_scaling_changes(saved, present)
        else:
            continues = "the learning rate continues its schedule, and the moments start at zero"
            changes += [f" --no-load-optim: {continues}; --finetune restarts schedule and iteration"]
    without = "" if with_optimizer else " without the optimizer's state"
    line = (
        f" loaded {path}{without}; resuming at iteration {progress.iteration}, "
        f"{progress.consumed_samples} samples"
    )
    if progress.consumed_samples == 0:  # the weights were imported, or no step was taken: nothing can change
        return Start(replace(progress, ordered_samples=None), [line, *changes])
    if progress.dataset_progress is None:
        progress = replace(progress, dataset_progress=DatasetProgress.from_settings(saved.get("data", {})))
    resumed = schedule.resumed(progress)
    lines = numbering_changes(saved, present)
    if config.data.dataset_order != "megatron":
        progress = replace(progress, ordered_samples=None)
    else:
        before = progress.ordered_samples
        progress, said = _ordered(
            progress,
            before=ordered_samples(saved, ranks) if before is None else before,
            requested=resumed.requested_samples(config.training, config.evaluation)["train"],
            samples=resumed.samples * resumed.islands,
            same_numbers=not lines,
        )
        lines += said
    lines += batch_changes(saved, ranks, config, resumed)
    lines += setting_changes(saved, ranks, present, engine.mesh.data_ranks)
    lines += rate_change(saved, ranks, resumed, progress)
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
