"""Settings of a run as a YAML file: what --config reads, and what every run with --save writes.

The file has a section per part of `Config`, with a line per field:

    model:
      num_layers: 12

A field may also be at the top level, because no two parts have a field of the same name. Dashes may take the
place of underscores. Values are read as flags are: by the field's type, whatever YAML calls them.
"""

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.model import NOT_SHAPE, ModelConfig, preset_fields
from megatron_zpp.config.options import (
    AUTO,
    Options,
    accepted,
    choices,
    fits,
    option_error,
    optional,
    reader,
    with_home,
)
from megatron_zpp.config.sources.provided import Provided
from megatron_zpp.config.words import did_you_mean
from megatron_zpp.storage.regular import read_limited

FLAG, DEEPSPEED_FLAG = "--config", "--deepspeed_config"
LARGEST_FILE = 1 << 20  # bytes; a file of settings has a few thousand


@dataclass(frozen=True, kw_only=True)
class SettingsFile(Options):
    """settings: from a file"""

    config: str | None = optional(
        "YAML file of settings, such as the config.yaml that a run writes to --save. Flags win over it.",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFile(Options):
    """DeepSpeed: settings from its JSON file"""

    deepspeed_config: str | None = optional(
        "DeepSpeed's JSON file. Each key is obeyed, reported as having no effect here, or refused; "
        "docs/guide/deepspeed.md lists them all.",
        flag=DEEPSPEED_FLAG,
        metavar="FILE",
    )


def obey_settings(path: str, parts: Mapping[str, type[Options]], provided: Provided) -> tuple[str, ...]:
    """Fill `provided` from a file; return notes on settings that are retired or that a preset replaces.

    Raises ValueError for a file that cannot be obeyed, and for an unknown preset.
    """
    preset, replaced = provided.get("model.model_preset"), set[str]()
    if preset is not None:  # the whole shape: a GPT preset names four fields and means others' defaults
        values = preset_fields(preset)
        kept = (name for name in NOT_SHAPE if values.get(name) is None)
        replaced = {*ModelConfig.__dataclass_fields__}.difference(kept)
    file, not_used = _File(path, parts), []
    for part, field, value, place in file.settings():
        if part == "model" and field in replaced:
            not_used += [field] if field not in provided.values["model"] else []
        else:
            provided.fill(part, field, value, place)
    if not_used:
        file.notes.append(f"--model-preset {preset}: replaces {', '.join(not_used)} of {path}")
    return tuple(file.notes)


def retired_fields() -> Mapping[str, Any]:
    """Return the OldFlag of each retired field."""
    from megatron_zpp.config.legacy.old_flags import RETIRED_FIELDS

    return RETIRED_FIELDS


def write_settings(values: Mapping[str, Options], comments: list[str]) -> str:
    """Return the YAML text, by part, of settings that neither a default nor other settings imply."""
    import yaml

    given = {part: settings for part, options in values.items() if (settings := not_implied(options))}
    lines = "".join(f"# {comment}\n" for comment in comments)
    return lines + yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=math.inf)


def not_implied(options: Options) -> dict[str, Any]:
    """Return the fields without which `options` would not be the same.

    A value that another one implies, such as a preset's, must not win over a flag that changes the other one.
    """
    fields = {field.name: field.default for field in dataclasses.fields(options)}
    values = {name: getattr(options, name) for name in fields if getattr(options, name) != fields[name]}
    for name in tuple(values):
        others = {other: value for other, value in values.items() if other != name}
        with contextlib.suppress(ValueError):  # the field is required, or another one needs it
            values = others if type(options)(**others) == options else values
    return values


class _File:
    """Reads one file; `notes` are on its retired settings."""

    def __init__(self, path: str, parts: Mapping[str, type[Options]]) -> None:
        self._path, self._parts, self._retired = path, parts, retired_fields()
        self.notes: list[str] = []
        self._hints = {part: typing.get_type_hints(cls) for part, cls in parts.items()}
        self._owners = {field: part for part, hints in self._hints.items() for field in hints}
        self._seen: set[str] = set()

    def settings(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield (part, field, value, place in the file) of every current setting that has a value.

        Raises ValueError, with file, line and key, for what is no setting.
        """
        import yaml

        try:
            root = yaml.compose(self._text(), Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark else ""
            problem = getattr(error, "problem", None) or " ".join(str(error).split())
            raise self._error(f"{where}not YAML ({problem})") from None
        except RecursionError:
            raise self._error("is nested too deeply; name a YAML file of settings") from None
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise self._error("line 1: must hold lines of NAME: VALUE")
        for key, value in root.value:
            name, is_section = _name(key), isinstance(value, yaml.MappingNode)
            if name in self._parts and not is_section:
                raise self._error(f"{_line(key)}: {name}: is a section; indent its settings below it")
            inside = value.value if is_section else ()
            if name in self._parts or (inside and all(_name(each) in self._retired for each, _ in inside)):
                for inner, setting in inside:  # if all are retired, it is a part no more
                    yield from self._setting(_name(inner), inner, setting, section=name)
            else:
                yield from self._setting(name, key, value, section=None)

    def _setting(
        self, name: str, key: Any, node: Any, section: str | None
    ) -> Iterator[tuple[str, str, Any, str]]:
        place = f"{FLAG} {self._path}: {_line(key)}"
        if retired := self._retired.get(name):
            if retired.computes:
                retired.check_saved(f"{place}: {name}", _value(node, retired.takes))
            self.notes.append(f"{place}: {name}: no effect here: {retired.why}")
            return
        part = self._owners.get(name)
        if part is None or section not in (None, part):
            raise self._error(f"{_line(key)}: {name}: {self._unknown(name, section)}")
        if name in self._seen:
            raise self._error(f"{_line(key)}: {name}: is there twice; remove one of them")
        self._seen.add(name)
        try:
            hint = self._hints[part][name]
            automatic = self._parts[part].__dataclass_fields__[name].metadata["auto"]
            value = AUTO if automatic and node.value == AUTO else _value(node, hint)
        except ValueError as error:
            from megatron_zpp.config.legacy.old_flags import RETIRED_VALUES

            replacement = RETIRED_VALUES.get(name, {}).get(str(node.value))
            problem = f"{node.value} is retired; use {replacement}" if replacement else error
            raise self._error(f"{_line(key)}: {name}: {problem}") from None
        if value is not None:
            yield part, name, with_home(value), place

    def _unknown(self, name: str, section: str | None) -> str:
        if name in self._owners:
            return f"belongs to {self._owners[name]}, not to {section}"
        hint = f"{did_you_mean(name, self._owners)} --help lists all, with dashes"
        return f"is not a setting; {hint.lstrip()}"

    def _text(self) -> str:
        try:
            return read_limited(self._path, LARGEST_FILE).decode()
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror}); name a YAML file of settings") from None
        except UnicodeDecodeError:
            raise self._error("is not UTF-8 text; name a YAML file of settings") from None

    def _error(self, problem: str) -> ValueError:
        return option_error(FLAG, self._path, problem)


def _name(key: Any) -> str:
    return key.value.replace("-", "_") if isinstance(key.value, str) else "?"


def _line(node: Any) -> str:
    return f"line {node.start_mark.line + 1}"


def _value(node: Any, hint: Any) -> Any:
    """Return a node's value as the type of a field; None for YAML's null. Raises ValueError."""
    if node.tag == "tag:yaml.org,2002:null":
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        nodes = node.value if node.id == "sequence" else [node]
        if kinds[-1] is not Ellipsis and len(nodes) != len(kinds):
            raise ValueError(f"must be a list of {len(kinds)} values")
        return tuple(_scalar(each, kinds[0]) for each in nodes)
    return _scalar(node, hint)


def _scalar(node: Any, hint: Any) -> Any:
    if node.id != "scalar":
        raise ValueError("must be a single value")
    text, known = node.value, choices(hint)
    value = text if known else reader(hint)(text)
    if hint is bool:
        value = {"true": True, "false": False}.get(text.lower())
    if not fits(value, hint):
        right = f"one of {', '.join(known)}" if known else accepted(hint)
        raise ValueError(f"{text!r} must be {right}")
    return value
