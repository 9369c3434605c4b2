"""Values given for settings, each with its source: a flag, an old flag, or a key of DeepSpeed's file."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.options import Options, UsageError, choices, fits, flag_of, option_error, printable

OTHERS = "old"  # where the typed flags of other programs and earlier versions are
# Fields of a part in groups: giving one of a group excludes the fields of the other groups.
_ALTERNATIVES = (
    ("precision", "bf16", "fp16", "fp32"),
    (
        "recompute",
        "recompute_activations",
        "recompute_granularity recompute_method recompute_num_layers recompute_offload",
    ),
    ("training", "train_iters", "train_samples"),
    ("data", "data_path split", "mock_data", "train_data_path valid_data_path test_data_path"),
    ("learning_rate", "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    ("learning_rate", "lr_decay_iters", "lr_decay_samples"),
    ("learning_rate", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
)


class Provided:
    """Values by part and field, each with the name that gave it.

    A field path is "part.field", such as "zero.zero_stage". A value that is given twice must be equal.
    """

    def __init__(self, parts: Mapping[str, type[Options]], typed: Mapping[str, Mapping[str, Any]]) -> None:
        """Start from `typed`, the values of current flags."""
        self.values = {part: dict(typed[part]) for part in parts}
        self._flags = {
            f"{part}.{field.name}": flag_of(field)
            for part, cls in parts.items()
            for field in dataclasses.fields(cls)
        }
        self._hints = {
            f"{part}.{name}": hint
            for part, cls in parts.items()
            for name, hint in typing.get_type_hints(cls).items()
        }
        self._filled: set[str] = set()  # field paths
        self._names: dict[str, str] = {}  # by field path, for values that a current flag did not give
        self._refused: dict[str, list[str]] = {}  # flags and keys with their values, by the reason

    def get(self, field_path: str) -> Any:
        """Return the value of a field path; None if it was not given."""
        part, field = field_path.split(".")
        return self.values[part].get(field)

    def name(self, field_path: str) -> str:
        """Return the name that gave a field path, else its current flag."""
        return self._names.get(field_path, self._flags[field_path])

    def put(self, field_path: str, value: Any, name: str, shown: object = "(given)") -> None:
        """Record a value given by `name`; `shown` is the value as the user wrote it.

        Raises ValueError if the field does not accept the value or was given another one before.
        """
        part, field = field_path.split(".")
        if not fits(value, self._hints[field_path]):
            accepted = " or ".join(map(str, _accepted(self._hints[field_path])))
            raise option_error(name, shown, f"must be {accepted}")
        if field not in self.values[part]:
            self.values[part][field] = value
            self._names[field_path] = name
        elif self.values[part][field] != value:
            raise option_error(
                name, shown, f"contradicts {self._given_as(field_path)}; make them equal or omit one"
            )

    def refuse(self, words: str, reason: str) -> None:
        """Record a flag or key, with its value, for `check_refused`, which raises for all at once."""
        self._refused.setdefault(reason, []).append(words)

    def check_refused(self, unknown: str, notes: tuple[str, ...]) -> None:
        """Raise UsageError, with `notes` on other flags, if a flag was refused or words are `unknown`."""
        if self._refused or unknown:
            raise UsageError("\n".join((*self._lines(), *((unknown,) if unknown else ()), *notes)))

    def fill(self, part: str, field: str, value: Any, name: str) -> None:
        """Record a value given by `name`, unless it or an alternative to it was given before."""
        if self.get(f"{part}.{field}") is not None or self._has_alternative(part, field):
            return
        self.values[part][field] = value
        self._names[f"{part}.{field}"] = name
        self._filled.add(f"{part}.{field}")

    def drop(self, field_path: str) -> None:
        """Forget the value of a field path, if it was given."""
        part, field = field_path.split(".")
        self.values[part].pop(field, None)
        self._names.pop(field_path, None)

    def _has_alternative(self, part: str, field: str) -> bool:
        """Whether another field that excludes this one was given by something else than `fill`."""
        others = {
            name
            for place, *groups in _ALTERNATIVES
            if place == part and any(field in group.split() for group in groups)
            for group in groups
            if field not in group.split()
            for name in group.split()
        }
        return any(name in self.values[part] and f"{part}.{name}" not in self._filled for name in others)

    def explain(self, message: str) -> str:
        """Return what was refused, a line per reason; then `message` on the value of one more flag.

        It is followed by the old flag or key behind each current flag that it mentions.
        """
        behind = [
            f"{self._flags[field_path]} is {name}"
            for field_path, name in self._names.items()
            if re.search(rf"(?<![\w-]){re.escape(self._flags[field_path])}(?![\w-])", message)
        ]
        return "\n".join((*self._lines(), f"{message} ({', '.join(behind)})" if behind else message))

    def _lines(self) -> list[str]:
        return [printable(f"{', '.join(words)}: {reason}") for reason, words in self._refused.items()]

    def _given_as(self, field_path: str) -> str:
        value = self.get(field_path)
        shown = "" if value is True else f" {str(value).lower() if value is False else value}"
        return self.name(field_path) + shown


def _accepted(hint: Any) -> tuple[Any, ...]:
    """Return the values that a field accepts, or their types."""
    return choices(hint) or typing.get_args(hint) or (hint.__name__,)
