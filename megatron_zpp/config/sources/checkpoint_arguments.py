"""--use-checkpoint-args and --use-checkpoint-opt-param-scheduler: settings that come from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.config.sources.provided import Provided
from megatron_zpp.config.tokenizer import TokenizerConfig

MODEL, SCHEDULE = "--use-checkpoint-args", "--use-checkpoint-opt-param-scheduler"
_OF_THE_RUN = ("seq_length", "attention_dropout", "hidden_dropout", "init_method_std")  # flags win


@dataclass(frozen=True)
class CheckpointArguments:
    """What a checkpoint says; `tokenizer` names files that can be read now."""

    name: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    learning_rate: LearningRateConfig
    weight_decay: float
    training: TrainingConfig


SavedArguments = Callable[[str, int | None], CheckpointArguments | None]


def obey_checkpoint(provided: Provided, saved: SavedArguments | None) -> tuple[str, ...]:
    """Replace the values of flags by those of the checkpoint; return a note for each that differs."""
    load, model = provided.get("checkpoint.load"), provided.get("checkpoint.use_checkpoint_args")
    schedule = provided.get("checkpoint.use_checkpoint_opt_param_scheduler")
    if saved is None or load is None or not (model or schedule):
        return ()
    arguments = saved(load, provided.get("checkpoint.ckpt_step"))
    if arguments is None:
        given = " and ".join(flag for flag, used in ((MODEL, model), (SCHEDULE, schedule)) if used)
        return (f"{given}: there is no checkpoint in {load} yet, so the other flags count",)
    notes = _obey_model(provided, arguments) if model else []
    return (*notes, *(_obey_schedule(provided, arguments) if schedule else []))


def _obey_model(provided: Provided, arguments: CheckpointArguments) -> list[str]:
    """Replace the model's shape; fill in the tokenizer, and what is the run's own, such as --seq-length."""
    place = f"{MODEL} {arguments.name}"
    provided.values["model"].pop("model_preset", None)
    shape = {name: value for name, value in vars(arguments.model).items() if value is not None}
    shape["fp32_residual_connection"] &= not provided.get("precision.fp32")  # in fp32 it always is
    for name in _OF_THE_RUN:
        provided.fill("model", name, shape.pop(name), place)
    if provided.get("tokenizer.tokenizer_type") is None and provided.get("tokenizer.vocab_file") is None:
        provided.fill_all("tokenizer", arguments.tokenizer, place)
    return _replace(provided, "model", shape, MODEL, arguments.name)


def _obey_schedule(provided: Provided, arguments: CheckpointArguments) -> list[str]:
    """The learning rate and the weight decay; a decay that ended with the saved run still ends there."""
    settings = dict(vars(arguments.learning_rate))
    for unit in ("iters", "samples"):
        if settings[f"lr_decay_{unit}"] is None:
            settings[f"lr_decay_{unit}"] = getattr(arguments.training, f"train_{unit}")
    notes = _replace(provided, "learning_rate", settings, SCHEDULE, arguments.name)
    decay = {"weight_decay": arguments.weight_decay}
    return notes + _replace(provided, "optimizer", decay, SCHEDULE, arguments.name)


def _replace(provided: Provided, part: str, settings: dict[str, Any], flag: str, name: str) -> list[str]:
    notes, values = [], provided.values[part]
    for field, value in settings.items():
        if field in values and values[field] != value:
            notes.append(f"{flag}: {flag_name(field)} {value} of {name} replaces {values[field]}")
        provided.drop(f"{part}.{field}")
        if value is not None:
            provided.put(f"{part}.{field}", value, f"of {flag} {name}")
    return notes
