"""Settings of a run as a YAML file: what --config reads, and what every run with --save writes.

The file has a section per part of `Config`, with a line per field:

    model:
      num_layers: 12

A field may also be at the top level, because no two parts have a field of the same name. Dashes may take the
place of underscores. Values are read as flags are: by the field's type, whatever YAML calls them.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.options import Options, option, option_error
from megatron_zpp.storage.regular import UnfitFile, read_limited

FLAG = "--config"
LARGEST_FILE = 1 << 20  # bytes; a file of settings has a few thousand


@dataclass(frozen=True, kw_only=True)
class SettingsFile(Options):
    """settings: from a file"""

    config: str | None = option(
        None,
        "YAML file of settings, such as the config.yaml that a run writes to --save. Flags win over it.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class Setting:
    """A value of a settings file, and where the file has it, for errors."""

    part: str
    field: str
    value: Any
    place: str


def read_settings(path: str, parts: Mapping[str, type[Options]]) -> list[Setting]:
    """Return the settings of a file. Raises ValueError, with file, line and key, for what is no setting."""
    return list(_File(path, parts).settings())


def write_settings(values: Mapping[str, Options], comments: list[str]) -> str:
    """Return the YAML text of all settings that differ from their defaults, by part."""
    lines = [f"# {comment}" for comment in comments]
    for part, options in values.items():
        given = [
            f"  {field.name}: {_yaml(getattr(options, field.name))}"
            for field in dataclasses.fields(options)
            if getattr(options, field.name) != field.default
        ]
        lines += [f"{part}:", *given] if given else []
    return "\n".join(lines) + "\n"


class _File:
    """Reads one file."""

    def __init__(self, path: str, parts: Mapping[str, type[Options]]) -> None:
        self._path, self._parts = path, parts
        self._hints = {part: typing.get_type_hints(cls) for part, cls in parts.items()}
        self._owners = {field: part for part, hints in self._hints.items() for field in hints}
        self._seen: set[str] = set()

    def settings(self) -> Iterator[Setting]:
        """Yield every setting that has a value."""
        import yaml

        try:
            root = yaml.compose(self._text(), Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark else ""
            problem = getattr(error, "problem", None) or " ".join(str(error).split())
            raise self._error(f"{where}not YAML ({problem})") from None
        except RecursionError:
            raise self._error(
                "is nested too deeply; it needs a section per part and a line per field"
            ) from None
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise self._error("line 1: must hold lines of NAME: VALUE")
        for key, value in root.value:
            name = self._name(key)
            if name in self._parts:
                if not isinstance(value, yaml.MappingNode):
                    raise self._error(
                        f"{_line(key)}: {name}: is a section; put its settings below it, indented"
                    )
                for inner, setting in value.value:
                    yield from self._setting(self._name(inner), inner, setting, section=name)
            else:
                yield from self._setting(name, key, value, section=None)

    def _setting(self, name: str, key: Any, node: Any, section: str | None) -> Iterator[Setting]:
        part = self._owners.get(name)
        if part is None or section not in (None, part):
            raise self._error(f"{_line(key)}: {name}: {self._unknown(name, section)}")
        if name in self._seen:
            raise self._error(f"{_line(key)}: {name}: is there twice; remove one of them")
        self._seen.add(name)
        try:
            value = _value(node, self._hints[part][name])
        except ValueError as error:
            raise self._error(f"{_line(key)}: {name}: {error}") from None
        if value is not None:
            yield Setting(part, name, value, f"{FLAG} {self._path}: {_line(key)}")

    def _unknown(self, name: str, section: str | None) -> str:
        if name in self._owners:
            return f"belongs to {self._owners[name]}, not to {section}"
        close = difflib.get_close_matches(name, self._owners, n=1, cutoff=0.8)
        return (
            f"is not a setting; {f'did you mean {close[0]}? ' if close else ''}--help lists all, with dashes"
        )

    def _name(self, key: Any) -> str:
        text = key.value if isinstance(key.value, str) else "?"
        return text.replace("-", "_")

    def _text(self) -> str:
        try:
            return read_limited(self._path, LARGEST_FILE).decode()
        except UnfitFile as error:
            raise self._error(f"{error.strerror}; name a YAML file of settings") from None
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror}); name a YAML file of settings") from None
        except UnicodeDecodeError:
            raise self._error("is not UTF-8 text; name a YAML file of settings") from None

    def _error(self, problem: str) -> ValueError:
        return option_error(FLAG, self._path, problem)


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
    text = node.value
    if typing.get_origin(hint) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(hint)}
        if text not in choices:
            raise ValueError(f"{text!r} must be one of {', '.join(choices)}")
        return choices[text]
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} must be true or false")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"{text!r} must be {'a whole number' if hint is int else 'a number'}") from None


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")  # or other readers take 1e-05 for a text
    return _quoted(value) if isinstance(value, str) else str(value) if value is not None else "null"


def _quoted(text: str) -> str:
    """Return text in YAML's double quotes."""

    def escaped(character: str) -> str:
        if character in '"\\':
            return f"\\{character}"
        if character.isprintable():
            return character
        return f"\\u{ord(character):04x}" if ord(character) < 1 << 16 else f"\\U{ord(character):08x}"

    return f'"{"".join(map(escaped, text))}"'
