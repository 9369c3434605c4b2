"""Values given for settings, each with its source: a flag, an old flag, or a key of DeepSpeed's file."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_zpp.config.options import (
    Options,
    UsageError,
    accepted,
    fits,
    flag_of,
    option_error,
    printable,
    value_error,
)

_ABSENT = re.compile(r"\(not given\)|^--dry-run: give ")  # in lines on what is not given
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

    def __init__(
        self,
        parts: Mapping[str, type[Options]],
        typed: Mapping[str, Mapping[str, Any]],
        unknown: str = "",
    ) -> None:
        """Start from `typed`, the values of current flags; `unknown` is a message on words without a meaning.

        Values that a flag cannot have are refused, and then count as not given.
        """
        self.values = {part: dict(typed[part]) for part in parts}
        self._unknown = unknown
        self.notes: tuple[str, ...] = ()  # on other flags than those that are refused
        fields = [(part, field) for part, cls in parts.items() for field in dataclasses.fields(cls)]
        self._flags = {f"{part}.{field.name}": flag_of(field) for part, field in fields}
        self._hints = {f"{part}.{field.name}": field.type for part, field in fields}
        self._filled: set[str] = set()  # field paths
        self._names: dict[str, str] = {}  # by field path, for values that a current flag did not give
        self._refused: dict[str, list[str]] = {}  # flags and keys with their values, by the reason
        self._errors: list[str] = []  # lines on values
        self._missing: set[str] = set()  # field paths whose value is refused
        for part, field in fields:
            if field.name in typed[part] and (error := value_error(field, typed[part][field.name])):
                self.lack([f"{part}.{field.name}"])
                self._errors.append(str(error))
                del self.values[part][field.name]

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
            self.lack([field_path])
            raise option_error(name, shown, f"must be {accepted(self._hints[field_path])}")
        if field not in self.values[part]:
            self.values[part][field] = value
            self._names[field_path] = name
        elif self.values[part][field] != value:
            given = self.values[part][field]
            other = "" if given is True else f" {str(given).lower() if given is False else given}"
            fix = f"contradicts {self.name(field_path)}{other}; make them equal or omit one"
            raise option_error(name, shown, fix)

    def refuse(self, words: str, reason: str, flag: str = "") -> None:
        """Record a flag or key, with its value, for `check_refused`, which raises for all at once.

        If a current flag is refused, it is named.
        """
        self._refused.setdefault(reason, []).append(words)
        self.lack(path for path, own in self._flags.items() if own == flag)

    def lack(self, field_paths: Iterable[str]) -> None:
        """Let fields have no value because what was given for them is refused."""
        self._missing.update(field_paths)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Record the ValueError of a check for `check_refused`, unless it mentions a refused value."""
        try:
            yield
        except ValueError as error:
            self.explain(str(error))

    def made(self, parts: Mapping[str, type[Options]]) -> dict[str, Any]:
        """Return the parts of which no value was refused, and record what their checks refuse."""
        found = {}
        for name, part in parts.items():
            if not any(field_path.startswith(f"{name}.") for field_path in self._missing):
                with self.collected():
                    found[name] = part(**self.values[name])
        return found

    def check_refused(self) -> None:
        """Raise UsageError if a flag or value was refused."""
        if lines := self._lines():
            raise UsageError("\n".join(lines))

    def fill(self, part: str, field: str, value: Any, name: str) -> None:
        """Record a value given by `name`, unless it or an alternative to it was given before."""
        if self.get(f"{part}.{field}") is not None or self._has_alternative(part, field):
            return
        self.values[part][field] = value
        self._names[f"{part}.{field}"] = name
        self._filled.add(f"{part}.{field}")

    def fill_all(self, part: str, options: Options, name: str) -> None:
        """Do so with all fields of `options` that have a value."""
        for field, value in vars(options).items():
            if value is not None:
                self.fill(part, field, value, name)

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
        """Record a message on values, and return it behind all that was refused before.

        Lines that mention a refused value do not count, nor do those on what is not given, where it may be
        what a refused flag or value was to give. The old flag or key behind a current flag follows.
        """
        for line in message.splitlines():
            words = {*re.findall(r"[\w-]+", line)}
            mentioned = [path for path, flag in self._flags.items() if flag in words]
            unsure = _ABSENT.search(line) and (self._unknown or self._refused or self._missing)
            if self._missing.isdisjoint(mentioned) and not unsure:
                names = {path: name for path, name in self._names.items() if path in mentioned}
                behind = ", ".join(f"{self._flags[path]} is {name}" for path, name in names.items())
                self._errors.append(f"{line} ({behind})" if behind else line)
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        """A line per reason for refusing flags, one on unknown words, one per refused value, and notes."""
        lines = [printable(f"{', '.join(words)}: {reason}") for reason, words in self._refused.items()]
        lines += [self._unknown] if self._unknown else []
        return [*lines, *dict.fromkeys(self._errors), *(self.notes if lines else ())]
