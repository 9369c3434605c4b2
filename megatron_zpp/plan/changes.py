"""The flags that turn the command line of one job into that of another: those to give, and those to omit."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron_zpp.config.options import flag_name
from megatron_zpp.plan.job import Job

# Fields that are None unless another flag is given, and what they are then if nothing is given for them.
_RESOLVED = {"recompute_num_layers": 1}
_OF_AN_OPTION = {  # fields that are refused, unless they have their default, without another
    "zero_quantized_weights_format": "zero_quantized_weights",
    "zero_quantized_gradients_format": "zero_quantized_gradients",
}


def changes(run: Job, other: Job, first: tuple[str, ...] = ()) -> str:
    """What to change in the command line of `run` for the settings of `other`, tensor ranks excepted.

    Flags to give with their values, and after `without` flags of the run to omit. The fields of `first` are
    settings of ZeRO++ that are named in that order, even if they do not change.
    """
    given, omitted = [_flag(name, getattr(other.zero, name)) for name in first], []
    for name, before, after, default in _differences(run, other):
        option = _OF_AN_OPTION.get(name)
        off = option is not None and after == default and not getattr(other.zero, option)
        if after is None or after is False or off:
            omitted.append(flag_name(name))
        elif name not in first and before != after:
            given.append(_flag(name, after))
    if run.demands_overlap and other.tensor == 1:
        omitted.append(flag_name("tp_comm_overlap"))
    return " ".join([*given, *(["without", *omitted] if omitted else [])])


def _flag(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def _differences(run: Job, other: Job) -> Iterator[tuple[str, Any, Any, Any]]:
    """Fields that differ: name, both values, and the default."""
    for part in ("zero", "recompute", "precision"):
        before, after = getattr(run, part), getattr(other, part)
        for field in fields(before):
            values = [_unresolved(field.name, getattr(each, field.name)) for each in (before, after)]
            if values[0] != values[1]:
                yield field.name, *values, field.default
    if run.micro_batch_size != other.micro_batch_size:
        yield "micro_batch_size", run.micro_batch_size, other.micro_batch_size, None


def _unresolved(name: str, value: Any) -> Any:
    return None if value == _RESOLVED.get(name) else value
