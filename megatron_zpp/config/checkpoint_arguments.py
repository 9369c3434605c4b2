"""--use-checkpoint-args: the model's shape and the tokenizer as a checkpoint has them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_name
from megatron_zpp.config.provided import Provided
from megatron_zpp.config.tokenizer import TokenizerConfig

FLAG = "--use-checkpoint-args"
_OF_THE_RUN = ("seq_length", "attention_dropout", "hidden_dropout", "init_method_std")  # flags win


@dataclass(frozen=True)
class CheckpointArguments:
    """What a checkpoint says; `tokenizer` names files that can be read now."""

    name: str
    model: ModelConfig
    tokenizer: TokenizerConfig


SavedArguments = Callable[[str, int | None], CheckpointArguments | None]


def obey_checkpoint(provided: Provided, saved: SavedArguments) -> tuple[str, ...]:
    """Replace the values of model flags by those of the checkpoint; return a note for each that differs.

    The values of the run itself, such as --seq-length, are only filled in, and so is the tokenizer.
    """
    load = provided.get("checkpoint.load")
    if not provided.get("checkpoint.use_checkpoint_args") or load is None:
        return ()
    arguments = saved(load, provided.get("checkpoint.ckpt_step"))
    if arguments is None:
        return (f"{FLAG}: there is no checkpoint in {load} yet, so flags give the model and the tokenizer",)
    notes = []
    values, place = provided.values["model"], f"{FLAG} {arguments.name}"
    values.pop("model_preset", None)
    for name, value in _settings(arguments.model).items():
        if name in _OF_THE_RUN:
            provided.fill("model", name, value, place)
            continue
        if name in values and values[name] != value:
            notes.append(f"{FLAG}: {flag_name(name)} {value} of {arguments.name} replaces {values[name]}")
        values[name] = value
    if provided.get("tokenizer.tokenizer_type") is None:
        for name, value in _settings(arguments.tokenizer).items():
            provided.fill("tokenizer", name, value, place)
    return tuple(notes)


def _settings(options: ModelConfig | TokenizerConfig) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
