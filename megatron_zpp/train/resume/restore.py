"""The start of a run: the newest memory snapshot or checkpoint that is whole, or new weights."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.directory import (
    LOOKUPS,
    candidates,
    iteration_of,
    lost_newest,
    named_checkpoint,
    removed_too_often,
    write_tracker,
)
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.load import load_checkpoint, saved_settings
from megatron_zpp.checkpoint.manifest import is_committed
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.distributed.exchange import Exchange, NoProgress
from megatron_zpp.storage.checksums import DamagedFile, OnProgress
from megatron_zpp.storage.location import Location, location
from megatron_zpp.train.memory_snapshots import held_snapshots
from megatron_zpp.train.resume.changes import (
    batch_changes,
    mask_changes,
    matmul_changes,
    model_changes,
    numbering_changes,
    order_change,
    ordered_samples,
    rate_change,
    setting_changes,
)
from megatron_zpp.train.resume.start import Start, named
from megatron_zpp.train.schedule.run_schedule import RunSchedule
from megatron_zpp.train.setup.bounded import bounded, read_together
from megatron_zpp.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from megatron_zpp.memory_snapshots.buddy_memory import BuddyMemory
    from megatron_zpp.memory_snapshots.held import HeldSnapshot

_SCHEDULE_GOES_ON = (
    " --no-load-optim: the learning rate continues its schedule, and the moments start at zero; --finetune "
    "restarts schedule and iteration"
)


def restore(
    config: Config,
    engine: ZeroEngine,
    tokenizer: dict[str, Any],
    store: dist.Store,
    schedule: RunSchedule,
    memory: "BuddyMemory | None" = None,
) -> Start:
    """Where the run starts, with lines that say so and name what is damaged and was skipped.

    `schedule` is that of a run which starts at iteration 0. `memory` may hold memory snapshots.

    Raises ValueError when no checkpoint is whole: a run that has some never starts from initial weights.
    """
    settings, files = config.checkpoint, FileWorker()
    exchange_for = partial(Exchange, store, engine.topology, config.distributed.timeout)
    if settings.huggingface:
        from megatron_zpp.checkpoint.huggingface.load import load_weights

        load_weights(settings.huggingface, engine, config.model, tokenizer)
        line = f" loaded the weights of {settings.load}; starting at iteration 0"
        return Start(named(Progress(), settings, exchange_for), [line])
    sources, warnings = _sources(settings, engine, memory, exchange_for, files)
    passed_over: list[tuple[_Source, str]] = []
    numbers, removals = count(), 0
    while sources:
        source, number = sources.pop(0), next(numbers)
        exchange = exchange_for(f"load/{number}")
        with bounded(exchange, *source.flag(config)):
            load = _brought(source, exchange, partial(_load, config, source, engine, tokenizer, schedule))
        in_memory = source.snapshot is not None
        start, problem = read_together(load, exchange, files, *source.flag(config), in_memory=in_memory)
        if problem is None:
            if memory is not None:
                memory.restored(None if source.snapshot is None else source.snapshot.name)
            if source.path is not None:
                with bounded(exchange, "--load", settings.load):
                    if engine.topology.rank == 0:
                        exchange.put("warnings", files.run(partial(_directory_warnings, settings), exchange))
                    warnings += exchange.get("warnings")
            warnings += [f" WARNING: {source} is skipped: {problem}" for source, problem in passed_over]
            return replace(
                start,
                progress=named(start.progress, settings, exchange_for),
                lines=[*warnings, *start.lines],
                saved=source.path is not None,
            )
        if gone := _removed(source, exchange, files, settings):
            removals += 1
            if removals == LOOKUPS:
                raise removed_too_often(gone)
            found = _agreed_candidates(settings, exchange_for(f"load/{number}/again"), files)
            tried = [source.path for source, _ in passed_over]
            held = [source for source in sources if source.path is None]
            sources = _in_order([*held, *(_Source(path) for path in found if path not in tried)])
            continue
        passed_over.append((source, problem))
    if memory is not None:
        memory.restored(None)
    if passed_over:
        raise _none_whole(config, passed_over)
    return Start(named(Progress(), settings, exchange_for), [*warnings, " starting from initial weights"])


@dataclass(frozen=True)
class _Source:
    """A checkpoint, or a memory snapshot and the memory that it is in."""

    path: Location | None = None
    snapshot: "HeldSnapshot | None" = None
    memory: "BuddyMemory | None" = None

    @property
    def iteration(self) -> int:
        """The iteration that it says to be of."""
        if self.snapshot is not None:
            return self.snapshot.name.iteration
        return (None if self.path is None else iteration_of(self.path)) or 0

    def __str__(self) -> str:
        return str(self.snapshot or self.path)

    def flag(self, config: Config) -> tuple[str, object]:
        """The flag that it belongs to, and the flag's value."""
        if self.snapshot is None:
            return "--load", config.checkpoint.load
        return "--buddy-snapshots", config.memory_snapshots.buddy_snapshots

    def bring(self, exchange: Exchange) -> Location:
        """The directory to read. See HeldSnapshot.bring."""
        if self.snapshot is None or self.memory is None:
            assert self.path is not None
            return self.path
        return self.snapshot.bring(self.memory, exchange)


def _sources(
    config: CheckpointConfig,
    engine: ZeroEngine,
    memory: "BuddyMemory | None",
    exchange_for: Callable[[str], Exchange],
    files: FileWorker,
) -> tuple[list[_Source], list[str]]:
    """What the run may start from, the newest first, and lines on memory snapshots that are not whole.

    Of the same iteration the memory comes first.
    """
    found = [_Source(path) for path in _agreed_candidates(config, exchange_for("load"), files)]
    held, lines = held_snapshots(memory, engine)
    return _in_order([*(_Source(snapshot=each, memory=memory) for each in held), *found]), lines


def _in_order(sources: list[_Source]) -> list[_Source]:
    return sorted(sources, key=lambda source: source.iteration, reverse=True)  # stable


def _removed(
    source: _Source, exchange: Exchange, files: FileWorker, config: CheckpointConfig
) -> Location | None:
    """The path of `source`, which could not be read, if it is no checkpoint any more. All ranks must call it.

    The lease keeps other runs away from --save, but not from the --load of a run that saves elsewhere: the
    run that owns it may remove old checkpoints meanwhile (--keep-last), and has saved newer ones.
    """
    path = source.path
    if path is None:
        return None
    with bounded(exchange, "--load", config.load):
        if exchange.topology.rank == 0:
            exchange.put("removed", files.run(lambda on_progress: not is_committed(path), exchange))
        return path if exchange.get("removed") else None


def _brought(
    source: _Source, exchange: Exchange, load: Callable[[Location, OnProgress], Start]
) -> Callable[[OnProgress], Start]:
    """`load` of the checkpoint's path; copies in the memory of other nodes are fetched first.

    Every rank must call it. Where the copies cannot be fetched, the result raises the error.
    """
    try:
        path = source.bring(exchange)
    except NoProgress:
        raise  # it says nothing about the copies
    except (DamagedFile, OSError) as error:
        return partial(_fail, error)
    return partial(load, path)


def _fail(error: Exception, on_progress: OnProgress) -> Start:
    raise error


def _none_whole(config: Config, passed_over: list[tuple[_Source, str]]) -> ValueError:
    load = config.checkpoint.load
    for source, problem in passed_over:
        if source.path is not None:
            fix = f"none of its checkpoints is whole: {problem}; omit --load to start from new weights"
            return option_error("--load", load, fix)
    source, problem = passed_over[0]
    return option_error(
        "--buddy-snapshots",
        config.memory_snapshots.buddy_snapshots,
        f"{source} is not whole: {problem}; --load {load} holds no checkpoint, so the next start, which "
        "finds nothing in memory, begins with new weights",
    )


def _agreed_candidates(config: CheckpointConfig, exchange: Exchange, files: FileWorker) -> list[Location]:
    """The checkpoints that rank 0 sees, because a shared file system may show ranks different ones."""
    if config.load is None:
        return []
    load = config.load
    with bounded(exchange, "--load", load):
        if exchange.topology.rank == 0:
            found = files.run(lambda on_progress: candidates(load, config.ckpt_step), exchange)
            exchange.put("candidates", [path.name for path in found])
        return [named_checkpoint(location(load), name) for name in exchange.get("candidates")]


def _directory_warnings(config: CheckpointConfig, on_progress: OnProgress) -> list[str]:
    """On rank 0: correct the tracker; lines on a newest checkpoint that is lost. Raises OSError."""
    assert config.load is not None  # it holds what was loaded
    directory = location(config.load)
    lost = None if config.ckpt_step is not None else lost_newest(directory)
    if config.load == config.save:
        write_tracker(directory)
    return [f" WARNING: {lost}: it is skipped"] if lost else []


def _load(
    config: Config,
    source: _Source,
    engine: ZeroEngine,
    tokenizer: dict[str, Any],
    schedule: RunSchedule,
    path: Location,
    on_progress: OnProgress,
) -> Start:
    """Load `source`, which is at `path`, on this rank, on a thread of its own."""
    settings = config.checkpoint
    with_optimizer = settings.load_optim and not settings.finetune
    on_gpu = engine.device.type == "cuda"
    with torch.cuda.device(engine.device) if on_gpu else nullcontext():  # a thread begins with device 0
        progress = load_checkpoint(
            path,
            engine,
            tokenizer,
            with_optimizer=with_optimizer,
            on_progress=on_progress,
            partial=source.snapshot is not None and source.snapshot.only_own,
        )
    (saved, ranks), present = saved_settings(path), config.to_json()
    changes = model_changes(saved, config.model)
    if settings.finetune:
        engine.iteration = 0  # the signs of rotated gradients and the first 4-bit iterations are a new run's
        return Start(Progress(), [f" loaded the weights of {path}; starting at iteration 0", *changes])
    if progress.iteration:  # otherwise the weights are imported, and no products were computed
        changes += matmul_changes(saved, present)
        if not with_optimizer:
            changes += [_SCHEDULE_GOES_ON]
    without = "" if with_optimizer else " without the optimizer's state"
    line = (
        f" loaded {source}{without}; resuming at iteration {progress.iteration}, "
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
            samples=resumed.samples,
            same_numbers=not lines,
        )
        lines += said
    lines += mask_changes(saved, present) + batch_changes(saved, ranks, config, resumed)
    lines += setting_changes(saved, ranks, present, engine.grid.data.world_size)
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
