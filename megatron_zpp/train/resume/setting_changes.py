"""Differences in schedule, optimizer, formats and ranks between a resumed run and the run that saved.

They are logged and not refused, because they may be intended. data_changes.py and model_changes.py say what
becomes of samples and weights.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.config.sources.settings_file import retired_fields
from megatron_zpp.train.schedule.run_schedule import RunSchedule

_COMPARED: Mapping[str, tuple[str, ...]] = {  # parts of the settings and their fields; none named: all
    "model": ("attention_dropout", "hidden_dropout"),
    "training": ("train_iters", "train_samples", "calculate_per_token_loss"),
    "learning_rate": (),
    "optimizer": (),
    "precision": (),
    "zero": (),
    "distributed": ("tensor_model_parallel_size",),
}
_OF_THE_START = {  # they change no number of a run
    *("zero_prefetch_units", "zero_copy_engines", "zero_check_interval", "zero_spare_multiprocessors"),
    "fp8",  # said by model_changes.product_changes
}
Settings = Mapping[str, Any]  # of a run, by part and name, as Config.to_json returns them


def setting_changes(saved: Settings, ranks: int, present: Settings, present_ranks: int) -> list[str]:
    """A log line that names each flag with another value than in the run that saved; none if there is none.

    Settings of which an older version knew nothing are not compared. Retired ones are named where they did
    not say what happens anyway. `ranks` are data ranks.
    """
    found = []
    for part, names in _COMPARED.items():
        before, now = saved.get(part, {}), present[part]
        for name in names or now:
            if name in before and name not in _OF_THE_START and before[name] != now[name]:
                found.append(f"{flag_name(name)} {_shown(before[name])} → {_shown(now[name])}")
        found += _retired({name: before[name] for name in before if name not in now})
    if ranks != present_ranks:
        found.append(f"data ranks {ranks} → {present_ranks}")
    return [f" changed since the checkpoint: {', '.join(found)}"] if found else []


def _retired(settings: Mapping[str, Any]) -> list[str]:
    """The retired ones of settings of an older version that did not say what happens now."""
    retired = retired_fields() if settings else {}
    return [
        f"{flag_name(name)} {_shown(value)} → retired"
        for name, value in settings.items()
        if name in retired and value not in (None, *retired[name].allowed)
    ]


def rate_change(saved: Settings, ranks: int, schedule: RunSchedule, progress: Progress) -> list[str]:
    """A log line if the learning rate of the next step is not the one that the run which saved would take.

    `schedule` is that of the resumed run, `ranks` are the data ranks of the other.
    """
    try:
        training = TrainingConfig(**_known(TrainingConfig, saved.get("training", {})))
        rates = LearningRateConfig(**_known(LearningRateConfig, saved.get("learning_rate", {})))
        before = RunSchedule.from_config(training, rates, ranks).resumed(progress)
    except (TypeError, ValueError):  # a flag of an older version, with another meaning
        return []
    was, now = before.learning_rate_at(progress), schedule.learning_rate_at(progress)
    if math.isclose(was, now, rel_tol=1e-6, abs_tol=1e-15):
        return []
    return [f" WARNING: the learning rate of the next step was {was:.3e} and is {now:.3e}"]


def _known(part: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(part)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if name in names
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "not given" if value is None else str(value)
