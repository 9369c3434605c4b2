"""The flags that turn the command line of one job into that of another: those to give, and those to omit."""

from dataclasses import fields
from typing import Any

from megatron_zpp.config.options import flag_name
from megatron_zpp.config.shapes.tensor_parallel import CONTEXT_FLAG, FLAG
from megatron_zpp.plan.job import Job

_OF_AN_OPTION = {  # fields that are refused, unless they have their default, without another
    "zero_quantized_weights_format": "zero_quantized_weights",
    "zero_quantized_gradients_format": "zero_quantized_gradients",
}


def changes(run: Job, other: Job) -> str:
    """What to change in the command line of `run` for the settings of `other`; empty if they are the same.

    Flags to give with their values, and after `without` flags of the run to omit.
    """
    flags = changed_flags(run, other)
    given = [flag if value is True else f"{flag} {value}" for flag, value in flags if value is not None]
    omitted = [flag for flag, value in flags if value is None]
    return " ".join([*given, *(["without", *omitted] if omitted else [])])


def changed_flags(run: Job, other: Job) -> list[tuple[str, Any]]:
    """Flags and their values in `other` where it differs from `run`; None: omit the flag."""
    own = {FLAG: "tensor", CONTEXT_FLAG: "context", "--micro-batch-size": "micro_batch_size"}
    values = [(flag, getattr(run, name), getattr(other, name)) for flag, name in own.items()]
    flags: list[tuple[str, Any]] = [(flag, after) for flag, before, after in values if before != after]
    if flags and not run.batch_given:  # its default depends on all three
        flags.append(("--global-batch-size", run.samples_per_step))
    for part in ("recompute", "zero", "precision"):
        before, after = getattr(run, part), getattr(other, part)
        for field in fields(before):
            sides = [getattr(each, field.name) for each in (before, after)]
            implied, option = field.metadata["implied"], _OF_AN_OPTION.get(field.name)
            old, new = (None if value == implied else value for value in sides)
            if old != new:
                off = option is not None and new == field.default and not getattr(other.zero, option)
                flags.append((flag_name(field.name), None if new is False or off else new))
    return flags
