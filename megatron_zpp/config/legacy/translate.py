"""Translates old flags into the values that current flags would have given, with a note naming those."""

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_zpp.config.legacy.megatron_features import feature_flag
from megatron_zpp.config.legacy.old_flag import VALUE, OldFlag
from megatron_zpp.config.legacy.old_flags import OLD_FLAGS, RENAMED, RETIRED_VALUES
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import AUTO, flag_name, option_error
from megatron_zpp.config.sources.provided import OTHERS, Provided

_LENGTH = "training.train_samples"
_BY_NAME = {flag.name: flag for flag in OLD_FLAGS}


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """Add all old flags to a parser, hidden from its help; typed values appear in the group `OTHERS`."""
    parser.add_argument("--deepspeed-config", dest="deepspeed.deepspeed_config", help=argparse.SUPPRESS)
    for name, flag in _BY_NAME.items():
        if flag.refused:
            details: dict[str, Any] = {"nargs": "*"}  # or argparse would complain about its values first
        else:
            details = {"action": "store_true"} if flag.takes is None else {"type": flag.takes}
            details |= {"nargs": "+"} if flag.many else {}
        parser.add_argument(name, dest=f"{OTHERS}.{name}", help=argparse.SUPPRESS, **details)
    known = ", ".join(flag.name for flag in RENAMED)
    parser.epilog = textwrap.fill(
        f"These old flags of Megatron-LM and Megatron-DeepSpeed work, and print their current names: "
        f"{known}. docs/guide/deepspeed.md lists them, flags without effect, and refused flags.",
        width=shutil.get_terminal_size().columns - 2,
        break_on_hyphens=False,
    )


def refuse_features(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Raise ValueError for the first flag of a feature of Megatron-LM that is not here.

    Such flags are not in the parser, which does not know how many values each takes.
    """
    known = parser._option_string_actions
    for word in argv:
        name = word.partition("=")[0]
        flag = None if name in known else feature_flag(name)
        if flag is not None:
            raise option_error(name, "(given)", f"not here: {flag.otherwise}")


def refuse_retired_values(argv: Sequence[str]) -> None:
    """Raise ValueError for the first retired value of a flag, which the parser would call unknown."""
    flags = {flag_name(field): values for field, values in RETIRED_VALUES.items()}
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        name, given, value = word.partition("=")
        value = value if given else following
        if value in flags.get(name, ()):
            raise option_error(name, value, f"is retired; use {flags[name][value]}")


def obey_old_flags(typed: Mapping[str, Any], provided: Provided) -> tuple[str, ...]:
    """Add the values of old flags to `provided`; return a note for each of them.

    Raises ValueError for a value that contradicts another flag or cannot be obeyed.
    """
    notes = []
    for name, value in typed.items():
        flag, shown = _BY_NAME[name], "(given)" if value is True or value == () else value
        if flag.refused:
            raise option_error(name, shown, f"not here: {flag.otherwise}")
        if flag.allowed and any(one not in flag.allowed for one in (value if flag.many else (value,))):
            allowed = " or ".join(map(str, flag.allowed))
            raise option_error(name, value, f"only {allowed} is possible: {flag.otherwise}")
        if flag.means and value not in flag.means:
            raise option_error(name, value, f"must be {' or '.join(flag.means)}")
        for field_path, setting in (flag.means[value] if flag.means else flag.gives).items():
            provided.put(field_path, value if setting is VALUE else setting, name, shown)
        notes += _note(name, flag)
    return tuple(notes)


def settle_old_flags(typed: Mapping[str, Any], provided: Provided) -> None:
    """Apply lower bounds and lengths in tokens, after all other values. Raises ValueError for contradictions.

    A run ends at the first of --train-samples and --train-tokens, as in Megatron-DeepSpeed.
    """
    for name, value in typed.items():
        if path := _BY_NAME[name].samples:
            samples = value // ModelConfig(**provided.values["model"]).seq_length
            if samples < 1:
                raise option_error(name, value, "must be a sample of --seq-length tokens, or more")
            if path == _LENGTH and (given := provided.get(path)) is not None:
                provided.values["training"]["train_samples"] = min(samples, given)
            else:
                provided.put(path, samples, name, value)
        for field_path, least in _BY_NAME[name].at_least.items():
            value = provided.get(field_path)
            if value is None:
                provided.put(field_path, least, name)
            elif value != AUTO and value < least:
                raise option_error(
                    name, "(given)", f"contradicts {provided.name(field_path)} {value}; omit one"
                )


def check_old_flags(typed: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raise ValueError for an old flag that needs another value of a setting; `parts` are all settings."""
    for name in typed:
        flag = _BY_NAME[name]
        for field_path, needed in flag.needs.items():
            part, field = field_path.split(".")
            value = getattr(parts[part], field)
            if value != needed:
                fix = f"cannot be obeyed with {flag_name(field)} {value}; {flag.otherwise}"
                raise option_error(name, "(given)", fix)


def _note(name: str, flag: OldFlag) -> list[str]:
    if flag.why:
        return [f"{name}: no effect here: {flag.why}"]
    return [f"{name}: an old name; use {flag.today}"] if flag.today else []
