"""Differences between a resumed run and the run that saved its checkpoint.

They are logged and not refused, because they may be intended. What changes a parameter is refused where the
weights are read; data/resume.py treats changes of data sets and of their weights.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.data import DEFAULT_SPLIT, MASKS
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.root import Config
from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.config.sources.settings_file import retired_fields
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.train.schedule.run_schedule import RunSchedule
from megatron_zpp.zero.model_states import is_residual

Settings: TypeAlias = Mapping[str, Any]  # of a run, by part and name, as Config.to_json returns them

NUMBERING = {  # settings that determine how samples are numbered, by part
    "data": ("split", "dataset_order", "dataset_packing", "json_key", "append_eod", "mock_data"),
    "training": ("seed",),
    "model": ("seq_length",),
    "islands": ("island_names", "island"),
}
_YOUNGER: Mapping[str, Settings] = {  # settings absent from older checkpoints, and the values their runs used
    "data": {"dataset_order": "windows", "dataset_packing": "concatenation", "json_key": "text"}
    | dict.fromkeys(("append_eod", *MASKS), False),
    "optimizer": dict.fromkeys(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "fp32")
    | {"optimizer_in_backward": False},
    "precision": {"fp8": False},
    "islands": {"outer_alone": False},
}
_FROM_NOW = "from here on the present flags number the samples, so some may be repeated or omitted"
_SAME_MODEL = {  # what the weights mean does not depend on these
    *("model_preset", "seq_length", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("init_method_std", "attention_dropout", "hidden_dropout"),
    *("use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
    *("group_query_attention", "add_qkv_bias"),  # num_query_groups says it; all biases include these
}
_COMPARED: Mapping[str, tuple[str, ...]] = {  # parts of the settings and their fields; none named: all
    "model": ("attention_dropout", "hidden_dropout", "use_mup", "mup_base_hidden_size"),
    "data": MASKS,
    "training": (
        *("train_iters", "train_samples", "train_tokens"),
        *("deterministic_mode", "calculate_per_token_loss", "z_loss_coeff"),
    ),
    "learning_rate": (),
    "optimizer": (),
    "islands": ("outer_alone", "outer_interval", "outer_lr", "outer_momentum"),
    "precision": (),
    "compilation": ("compile",),
    "zero": (),
    "distributed": ("tensor_model_parallel_size", "context_parallel_size"),
}
_CHANGES_NO_NUMBER = "zero_prefetch_units"  # of a run


def model_changes(saved: Settings, present: ModelConfig) -> list[str]:
    """Log lines on flags that give the weights of a checkpoint another meaning than in the run that saved it.

    Fields of which an older version knew nothing have their defaults.
    """
    known = _known(ModelConfig, saved.get("model", {}))
    known.pop("model_preset", None)
    if not known:
        return []
    names = (field.name for field in fields(ModelConfig) if field.name not in _SAME_MODEL)
    return _warnings(
        vars(ModelConfig(**known)), vars(present), names, "the weights are those of another model"
    )


def residual_changes(saved: Iterable[str], present: Iterable[str]) -> list[str]:
    """A log line if this run does not send what each node's codes lost of gradients, by kinds of states."""
    theirs, ours = (list(filter(is_residual, kinds)) for kinds in (saved, present))
    if not theirs or theirs == ours:
        return []
    if not ours:
        return [
            " WARNING: what 4-bit codes have lost of gradients is dropped: this run has no error feedback"
        ]
    return [" what 4-bit codes have lost of gradients is summed: the number of nodes differs"]


def row_scaling_changes(saved: Settings, present: Settings) -> list[str]:
    """A log line if NorMuon begins, or ends."""
    before, now = (
        settings["optimizer"].get("muon_row_scaling_beta2") is not None for settings in (saved, present)
    )
    if before and not now:
        return [" WARNING: the moments of rows are dropped: this run has no --muon-row-scaling-beta2"]
    return [" the moments of rows begin at zero: --muon-row-scaling-beta2 is new"] if now > before else []


def numbering_changes(saved: Settings, present: Settings) -> list[str]:
    """Log lines on flags that number samples differently from the run that saved."""
    lines = []
    for part, names in NUMBERING.items():
        before, now = (_with_split(settings.get(part, {})) for settings in (saved, present))
        lines += _warnings({**_YOUNGER.get(part, {}), **before}, now, names, _FROM_NOW)
    return lines


def batch_changes(saved: Settings, ranks: int, config: Config, schedule: RunSchedule) -> list[str]:
    """A log line if the global batch size differs from the run's that saved, which had `ranks` data ranks.

    `schedule` is that of the resumed run.
    """
    before, after = _batches(saved.get("training", {}), ranks), schedule.batches
    if before is None or (before.global_batch_size, before.rampup) == (after.global_batch_size, after.rampup):
        return []
    start, left = schedule.start, max(0, schedule.iterations - schedule.start.iteration)
    changed = f" the global batch size was {_size(before)} and is {_size(after)}"
    if config.training.global_batch_size is None:
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
    remain += "; no sample is skipped or repeated"
    evaluated, size = schedule.evaluated_samples(config.evaluation), before.global_batch_size
    if evaluated and size != after.global_batch_size:  # the curve jumps
        remain += f"; an evaluation reads {evaluated:,} samples, not {config.evaluation.eval_iters * size:,}"
    return [f"{changed}: {remain}"] if left or old else []


def ordered_samples(saved: Settings, ranks: int) -> int:
    """The number of samples that an older version's run built Megatron-LM's order for."""
    training = saved.get("training", {})
    size = _batch_size(training, ranks)
    return training.get("train_samples") or (training.get("train_iters") or 0) * size


def order_change(before: int, now: int) -> str:
    """The line for the log when Megatron-LM's order was built for `before` samples and is for `now`."""
    return (
        f" WARNING: the run was to read {before} samples and is to read {now}, on which the order of "
        f"--dataset-order megatron depends: {_FROM_NOW}"
    )


def setting_changes(saved: Settings, ranks: int, present: Settings, present_ranks: int) -> list[str]:
    """A log line that names each flag with another value than in the run that saved; none if there is none.

    Settings of which an older version knew nothing are not compared. Retired ones are named where they did
    not say what happens anyway. `ranks` are data ranks.
    """
    found = []
    for part, names in _COMPARED.items():
        before, now = {**_YOUNGER.get(part, {}), **saved.get(part, {})}, present[part]
        for name in names or now:
            if name in before and name != _CHANGES_NO_NUMBER and before[name] != now[name]:
                found.append(f"{flag_name(name)} {_shown(before[name])} → {_shown(now[name])}")
        found += _retired({name: before[name] for name in before if name not in now})
    if ranks != present_ranks:
        found.append(f"data ranks {ranks} → {present_ranks}")
    return [f" changed since the checkpoint: {', '.join(found)}"] if found else []


def rate_change(saved: Settings, ranks: int, schedule: RunSchedule, progress: Progress) -> list[str]:
    """A log line if the learning rate of the next step is not the one that the run which saved would take.

    `schedule` is that of the resumed run, `ranks` are the data ranks of the other.
    """
    try:
        training = TrainingConfig(**_known(TrainingConfig, saved.get("training", {})))
        rates = LearningRateConfig(**_known(LearningRateConfig, saved.get("learning_rate", {})))
        before = RunSchedule.from_config(training, rates, ranks, seq_length=1)  # it changes no rate
        before = before.resumed(progress)
    except (TypeError, ValueError):  # a flag of an older version, with another meaning
        return []
    was, now = before.learning_rate_at(progress), schedule.learning_rate_at(progress)
    if math.isclose(was, now, rel_tol=1e-6, abs_tol=1e-15):
        return []
    return [f" WARNING: the learning rate of the next step was {was:.3e} and is {now:.3e}"]


def _warnings(before: Settings, now: Settings, names: Iterable[str], consequence: str) -> list[str]:
    """A log line for each of the settings `names` that differs."""
    return [
        f" WARNING: {flag_name(name)} was {_shown(before.get(name))} and is {_shown(now.get(name))}: "
        f"{consequence}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _retired(settings: Settings) -> list[str]:
    """The retired ones of settings of an older version that did not say what happens now."""
    retired = retired_fields() if settings else {}
    return [
        f"{flag_name(name)} {_shown(value)} → retired"
        for name, value in settings.items()
        if name in retired and value not in (None, *retired[name].allowed)
    ]


def _with_split(settings: Settings) -> dict[str, Any]:
    """Settings with --split as applied: it has a default for --data-path, none for --train-data-path."""
    if settings.get("data_path"):
        return {**settings, "split": settings.get("split") or DEFAULT_SPLIT}
    return (
        {**settings, "split": "all of --train-data-path"} if settings.get("train_data_path") else {**settings}
    )


def _batch_size(training: Settings, ranks: int) -> int:
    return training.get("global_batch_size") or (training.get("micro_batch_size") or 0) * ranks


def _batches(training: Settings, ranks: int) -> BatchSchedule | None:
    """The global batches of a run on `ranks` data ranks, as seen by one; None if the settings lack a size."""
    size, rampup = _batch_size(training, ranks), training.get("rampup_batch_size")
    return BatchSchedule(1, size, 1, tuple(rampup) if rampup else None) if size else None


def _size(batches: BatchSchedule) -> str:
    if batches.rampup is None:
        return str(batches.global_batch_size)
    start, increment, samples = batches.rampup
    return f"{batches.global_batch_size} after a ramp from {start} by {increment} over {samples:,} samples"


def _known(part: type, settings: Settings) -> dict[str, Any]:
    names = {field.name for field in fields(part)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if name in names
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not given" if value is None else str(value)
