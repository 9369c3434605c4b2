"""Differences in data and batches between a resumed run and the run that saved its checkpoint.

They are logged and not refused, because they may be intended. data/resume.py treats changes of data sets
and of their weights.
"""

from typing import Any, TypeAlias

from megatron_zpp.config.data import DEFAULT_SPLIT, MASKS
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.train.schedule.run_schedule import RunSchedule

_READ = (  # settings that determine how samples are numbered
    ("data", "split"),
    ("data", "dataset_order"),
    ("data", "json_key"),
    ("data", "append_eod"),
    ("data", "mock_data"),
    ("training", "seed"),
    ("model", "seq_length"),
)
_YOUNGER = {  # settings absent from older checkpoints, and the values their runs used
    "dataset_order": "windows",
    "json_key": "text",
    "append_eod": False,
}


Settings: TypeAlias = dict[str, dict[str, Any]]  # of a run, by part and name, as Config.to_json returns them


def data_changes(saved: Settings, present: Settings) -> list[str]:
    """Log lines on flags that number samples differently from the checkpoint's settings."""
    lines = []
    for part, name in _READ:
        before, now = (_value(settings.get(part, {}), name) for settings in (saved, present))
        if before != now and not (before is None and now == _YOUNGER.get(name)):
            flag = "--" + name.replace("_", "-")
            lines.append(f" WARNING: {flag} was {_shown(before)} and is {_shown(now)}: {_FROM_NOW}")
    return lines


def mask_changes(saved: Settings, present: Settings) -> list[str]:
    """Log lines on flags that treat document ends differently from the checkpoint's run."""
    lines = []
    for name in MASKS:
        before, now = (bool(settings.get("data", {}).get(name)) for settings in (saved, present))
        if before != now:
            flag = "--" + name.replace("_", "-")
            given = "given, and was not" if now else "not given, and was"
            lines.append(f" WARNING: {flag} is {given}: the change applies from this iteration on")
    return lines


def batch_changes(saved: Settings, ranks: int, present: Settings, schedule: RunSchedule) -> list[str]:
    """A log line if the global batch size differs from the run's that saved, which had `ranks` data ranks.

    `schedule` is that of the resumed run.
    """
    before, after = _batches(saved.get("training", {}), ranks), schedule.batches
    if before is None or (before.global_batch_size, before.rampup) == (after.global_batch_size, after.rampup):
        return []
    start, left = schedule.start, max(0, schedule.iterations - schedule.start.iteration)
    changed = f" the global batch size was {_size(before)} and is {_size(after)}"
    if present["training"]["global_batch_size"] is None:
        fix = f"give --global-batch-size {before.global_batch_size} to keep it"
        changed += f" (--micro-batch-size × ranks; {fix})"
    consumed = start.consumed_samples
    if schedule.train_samples is None:
        old = before.samples_after(left, consumed=consumed) - consumed
        remain = (
            f"the remaining {left:,} iterations read {schedule.samples - consumed:,} samples, not {old:,}"
        )
    else:
        old, samples = before.iterations(schedule.train_samples, consumed=consumed), schedule.train_samples
        remain = f"the remaining {max(0, samples - consumed):,} samples are {left:,} iterations, not {old:,}"
    return [f"{changed}: {remain}; no sample is skipped or repeated"]


def ordered_samples(saved: Settings, ranks: int) -> int:
    """The number of samples that an older version's run built Megatron-LM's order for."""
    training = saved.get("training", {})
    batch = training.get("global_batch_size") or (training.get("micro_batch_size") or 0) * ranks
    return training.get("train_samples") or (training.get("train_iters") or 0) * batch


def order_change(before: int, now: int) -> str:
    """The line for the log when Megatron-LM's order was built for `before` samples and is for `now`."""
    return (
        f" WARNING: the run was to read {before} samples and is to read {now}, on which the order of "
        f"--dataset-order megatron depends: {_FROM_NOW}"
    )


_FROM_NOW = "from here on the present flags number the samples, so some may be repeated or omitted"


def _value(settings: dict[str, Any], name: str) -> Any:
    """A setting's value; --split as applied: it has a default for --data-path, none for --train-data-path."""
    if name != "split" or not (settings.get("data_path") or settings.get("train_data_path")):
        return settings.get(name)
    cut = settings.get("split") or DEFAULT_SPLIT
    return cut if settings.get("data_path") else "all of --train-data-path"


def _batches(training: dict[str, Any], ranks: int) -> BatchSchedule | None:
    """The global batches of a run on `ranks` data ranks, as seen by one; None if the settings lack a size."""
    size = training.get("global_batch_size") or (training.get("micro_batch_size") or 0) * ranks
    rampup = training.get("rampup_batch_size")
    if not size:
        return None
    if not rampup:
        return BatchSchedule(1, size, 1)
    start, increment, samples = rampup
    return BatchSchedule(1, size, 1, (start, increment, samples))


def _size(batches: BatchSchedule) -> str:
    if batches.rampup is None:
        return str(batches.global_batch_size)
    start, increment, samples = batches.rampup
    return f"{batches.global_batch_size} after a ramp from {start} by {increment} over {samples:,} samples"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
