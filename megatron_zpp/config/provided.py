"""What was given for each setting, and by which name: a flag of today's, an old one, or a key of a file."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.options import Options, fits, flag_of, option_error


class Provided:
    """Values by part and field, each with the name that it was given by.

    A place is "part.field", as in "zero.zero_stage". What was given twice must be equal.
    """

    def __init__(self, parts: Mapping[str, type[Options]], typed: Mapping[str, Mapping[str, Any]]) -> None:
        """`typed` is what flags of today's said."""
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
        self._names: dict[str, str] = {}  # of what no flag of today's said

    def get(self, field_path: str) -> Any:
        """The value of a place; None where nothing was given."""
        part, field = field_path.split(".")
        return self.values[part].get(field)

    def name(self, field_path: str) -> str:
        """What a place was given by, else today's flag of it."""
        return self._names.get(field_path, self._flags[field_path])

    def put(self, field_path: str, value: Any, name: str, shown: object = "(given)") -> None:
        """Takes a value that `name` gives in the words `shown`.

        Raises ValueError when it is none of the place's choices, or when the place has another one already.
        """
        part, field = field_path.split(".")
        if not fits(value, self._hints[field_path]):
            choices = " or ".join(str(choice) for choice in _choices(self._hints[field_path]))
            raise option_error(name, shown, f"must be {choices}")
        if field not in self.values[part]:
            self.values[part][field] = value
            self._names[field_path] = name
        elif self.values[part][field] != value:
            raise option_error(
                name, shown, f"contradicts {self._there(field_path)}; make them equal or leave one out"
            )

    def explain(self, message: str) -> str:
        """`message` with the names behind those flags in it that were not typed as they stand there."""
        behind = [
            f"{self._flags[field_path]} is {name}"
            for field_path, name in self._names.items()
            if re.search(rf"(?<![\w-]){re.escape(self._flags[field_path])}(?![\w-])", message)
        ]
        return f"{message} ({', '.join(behind)})" if behind else message

    def _there(self, field_path: str) -> str:
        value = self.get(field_path)
        shown = "" if value is True else f" {str(value).lower() if value is False else value}"
        return self.name(field_path) + shown


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a field may have, or the types of its values."""
    parts = typing.get_args(hint) or (hint.__name__,)
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return typing.get_args(literals[0]) if literals else parts
