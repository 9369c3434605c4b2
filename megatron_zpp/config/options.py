"""Turns frozen dataclasses into command-line flags: one field is the default, the flag and its help."""

import argparse
import dataclasses
import math
import operator
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from typing import Any, NoReturn

from megatron_zpp.config.words import did_you_mean, either
from megatron_zpp.version import __version__

REQUIRED: Any = MISSING
# Of Unicode's categories Cc and Cf: controls, and marks of direction (bidi) and invisible separators.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_PLACEHOLDERS = ("", "DIRECTORY", "NAME", "N", "K")  # of any value, in what an option needs
AUTO: Any = "auto"  # the value of a number, where `option` allows it, that the plan of the run replaces
_HOME = re.compile(r"(?:~|\$HOME|\$\{HOME\})(?=/|$)")


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    positional: bool = False,
    typed: bool = True,
    needs: str = "",
    auto: bool = False,
    implied: Any = None,
    **bounds: float,
) -> Any:
    """Declare a field that is also a flag; `bounds` are at_least, at_most, above and below.

    Unless `flag` names it, the flag is `--` and the field's name with dashes. A boolean that defaults to
    True becomes `--no-…`; `bool | None` gets both forms. Type and choices come from the annotation.
    `metavar` is the placeholder of the value in the help. `auto`: AUTO may stand for the number, until the
    plan of the run replaces it. `implied`: what `fill_implied` makes of the default None. `REQUIRED` as the
    default makes the flag mandatory. A `positional` field has no flag and is always mandatory. Without
    `typed` a field has no flag either: it is for published models and files of settings. `Options` checks
    the bounds, for every number of a tuple, and refuses an empty string unless the default is or contains
    one. It refuses a value other than the default without what it `needs`, as in "--load DIRECTORY" or
    "--zero-stage 1, 2 or 3": other flags of the group, with " and " or " or " between them, each with its
    possible values or one of _PLACEHOLDERS.
    """
    help = f"{help} Needs {needs}." if needs else help
    told = {"help": help, "flag": flag, "metavar": metavar, "positional": positional, "typed": typed}
    rules = {"needs": needs, "auto": auto, "implied": implied, "bounds": bounds}
    return dataclasses.field(default=default, metadata=told | rules)


def switch(help: str, **more: Any) -> Any:
    """Declare a boolean field as `option` does, False by default."""
    return option(False, help, **more)


def optional(help: str, **more: Any) -> Any:
    """Declare a field as `option` does, None by default."""
    return option(None, help, **more)


def count(default: Any, help: str, **more: Any) -> Any:
    """Declare a field as `option` does, for a whole number of at least 1."""
    return option(default, help, at_least=1, **more)


def option_error(flag: str, value: object, fix: str) -> ValueError:
    """Return the error for a refused setting: the flag, its value, and what would be right."""
    shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return ValueError(printable(f"{flag} {shown}: {fix}"))


def printable(text: str) -> str:
    """Return `text` with escapes for what a terminal would obey or no stream could take.

    These are control characters, marks that change the direction of what follows, and halves of surrogate
    pairs, which Python makes of bytes of a command line that are not UTF-8. Ends of lines and tabs stay.
    """
    safe = text.encode(errors="backslashreplace").decode()
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), safe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A group of settings. Subclasses declare fields with `option` and rules across fields in `check`."""

    def __post_init__(self) -> None:
        """Raise ValueError, with a line per refused value; rules across fields need all of these."""
        fields = dataclasses.fields(self)
        refused = [error for field in fields if (error := value_error(field, getattr(self, field.name)))]
        if not refused:
            self.check()
            for field in fields:
                needs = field.metadata["needs"]
                if needs and getattr(self, field.name) != field.default and not self._has(needs):
                    refused.append(self.error(field.name, f"needs {needs}"))
        if refused:
            raise ValueError("\n".join(map(str, refused)))

    def check(self) -> None:
        """Raise an `option_error` if fields contradict each other."""

    def fill_implied(self) -> None:
        """Give fields without a value what their declarations imply, where they have what they need."""
        for field in dataclasses.fields(self):
            implied, needs = field.metadata["implied"], field.metadata["needs"]
            if implied is not None and (not needs or self._has(needs)):
                self.fill(field.name, implied)

    def fill(self, name: str, value: Any) -> None:
        """Give a field a value unless it has one; for `check`, when nobody has seen the old value."""
        if getattr(self, name) is None or getattr(self, name) is False:
            object.__setattr__(self, name, value)

    def error(self, name: str, fix: str) -> ValueError:
        """Return the error for the value of a field: its flag, the value, and what would be right."""
        value = getattr(self, name)
        shown = "(not given)" if value in (None, ()) else "(given)" if isinstance(value, bool) else value
        return option_error(flag_of(self.__dataclass_fields__[name]), shown, fix)

    def check_alternatives(self, *names: str) -> None:
        """Raise an `option_error` if several of these fields have a value: only one of them can count."""
        given = [name for name in names if getattr(self, name)]
        if len(given) > 1:
            raise self.error(given[1], f"contradicts {flag_name(given[0])}; give one")

    def _has(self, needs: str) -> bool:
        """Whether the fields have what `option` says of `needs`."""
        return all(
            any(map(self._has_one, re.split(r" or (?=--)", clause))) for clause in needs.split(" and ")
        )

    def _has_one(self, need: str) -> bool:
        flag, _, values = need.partition(" ")
        value = getattr(self, flag[2:].replace("-", "_"))
        if values in _PLACEHOLDERS:
            return value not in (None, False, ())
        if value == AUTO and self.__dataclass_fields__[flag[2:].replace("-", "_")].metadata["auto"]:
            return True  # what replaces it is checked again
        return str(value) in re.split(", | or ", values)


def flag_name(field_name: str) -> str:
    """Return the flag of a field whose declaration names no other: `--num-layers` for `num_layers`."""
    return "--" + field_name.replace("_", "-")


def flag_of(field: dataclasses.Field) -> str:
    """Return the flag of a field, such as `--num-layers`.

    For a positional field that is its name in capitals, for one that is not typed its name.
    """
    if field.metadata["positional"]:
        return field.name.upper()
    if not field.metadata["typed"]:
        return field.name
    if field.metadata["flag"]:
        return field.metadata["flag"]
    name = field.name.replace("_", "-")
    return f"--no-{name}" if field.default is True else f"--{name}"


def make_parser(
    prog: str,
    description: str,
    groups: Mapping[str, type[Options]],
    *,
    only: Collection[str] | None = None,
) -> "_OneLineParser":
    """Return a parser without abbreviations, whose help has a section per class, titled by its docstring.

    `only` names the flags that it has; default all.
    """
    parser = _OneLineParser(
        prog=prog,
        usage="%(prog)s [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"megatron_zpp {__version__}",
        help="show the version of megatron_zpp and exit",
    )
    for group_name, cls in groups.items():
        title = (cls.__doc__ or cls.__name__).strip().splitlines()[0]
        section = parser.add_argument_group(title.rstrip("."))
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if not field.metadata["typed"] or (only is not None and flag_of(field) not in only):
                continue
            destination, details = f"{group_name}.{field.name}", _argparse_type(hints[field.name], field)
            if field.metadata["positional"]:
                details.pop("required", None)  # argparse refuses this argument for positionals
                section.add_argument(destination, **details, help=_help(field))
            else:
                section.add_argument(flag_of(field), dest=destination, **details, help=_help(field))
    return parser


def parse_known(
    parser: argparse.ArgumentParser, groups: Iterable[str], argv: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Return what was typed, by group and field, and a message on words that mean nothing; empty without any.

    Other fields are absent, so that presets can fill them. Text that is no number is text, for `value_error`.
    """
    namespace, unknown = parser.parse_known_args(list(argv))
    flags, message = [flag for action in parser._actions for flag in action.option_strings], ""
    if unknown:
        first, lists_flags = unknown[0].split("=", 1)[0], getattr(parser, "lists_flags", "--help")
        meant = did_you_mean(first, flags) if first.startswith("-") else ""
        words = " ".join(unknown).strip() or f"{first!r}, maybe behind a backslash"
        said = f"unrecognized argument {words}{meant and '; '}{meant}"
        message = f"{said} ({lists_flags} lists every flag)"
    typed: dict[str, dict[str, Any]] = {name: {} for name in groups}
    for destination, value in vars(namespace).items():
        group_name, field_name = destination.split(".", 1)
        typed[group_name][field_name] = with_home(tuple(value) if isinstance(value, list) else value)
    return typed, message


def with_home(value: Any) -> Any:
    """Return a value, or each of a tuple, with the home directory in place of a leading ~ or $HOME.

    A shell expands neither in `--save=~/run`, nor in a file of settings.
    """
    if isinstance(value, tuple):
        return tuple(map(with_home, value))
    if isinstance(value, str) and _HOME.match(value):
        return _HOME.sub(lambda found: os.path.expanduser("~"), value)
    return value


class UsageError(ValueError):
    """The command line is wrong: programs print the message and exit with status 2."""


@contextmanager
def usage_errors(explain: Callable[[str], str] = str) -> Iterator[None]:
    """Turn a ValueError of a check that reads no file into a UsageError: no restart can help.

    `explain` returns its message from the error's.
    """
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(explain(str(error))) from error


class _OneLineParser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of printing its usage block and exiting."""

    lists_flags = "--help"  # what lists every flag, for errors

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.lists_flags} lists every flag)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Never break a line at the hyphen of a flag, so that the flag can be found by a search."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a field's type: T, T | None, Literal, tuple[T, ...] or tuple[T, T]."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        if type(value) is tuple and parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return type(value) is tuple and len(value) == len(parts) and all(map(fits, value, parts))
    return type(value) is hint or (hint is float and type(value) is int)


def _help(field: dataclasses.Field) -> str:
    text = field.metadata["help"].replace("%", "%%")
    if field.default is MISSING:
        return f"{text} [required]"
    if field.default is None or isinstance(field.default, bool) or field.default == ():
        return text
    shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{text} [{shown}]"


def _argparse_type(hint: Any, field: dataclasses.Field) -> dict[str, Any]:
    """Return argparse's arguments for `hint`: T, T | None, Literal, tuple[T, ...] or tuple[T, T]."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        if hint is bool:
            return {"action": argparse.BooleanOptionalAction}
    required = {"required": True} if field.default is MISSING else {}
    if hint is bool:
        return {"action": "store_false" if field.default is True else "store_true"}
    if typing.get_origin(hint) is typing.Literal:
        known = {str(each).lower(): each for each in typing.get_args(hint)}  # H100 is h100
        shown = {"metavar": f"{{{','.join(map(str, known.values()))}}}", **required}
        return {"type": lambda text: known.get(text.lower(), text), **shown}
    metavar = field.metadata["metavar"] or _metavar(hint, field.name)
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        count = "+" if parts[-1] is Ellipsis else len(parts)
        return {"type": reader(parts[0]), "nargs": count, "metavar": metavar, **required}
    metavar = f"{metavar}|{AUTO}" if field.metadata["auto"] else metavar
    return {"type": reader(hint), "metavar": metavar, **required}


def reader(kind: type) -> Callable[[str], Any]:
    """Return what reads a value of a kind from text; text that is no number stays as it is."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return read


def is_read(value: Any, kind: type | None) -> bool:
    """Return whether a value of a kind, or each of several, is what `reader` could read."""
    values = value if isinstance(value, tuple) else (value,)
    return kind not in (int, float) or not any(isinstance(one, str) for one in values)


def accepted(hint: Any) -> str:
    """Return what a field of a type accepts, in words."""
    known = choices(hint)
    return either(known) if known else _WORDS.get(_kind(hint), "")


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _metavar(hint: Any, name: str) -> str:
    """Return N for whole numbers, X for other numbers, else the last word of the name in capitals."""
    return {int: "N", float: "X"}.get(_kind(hint)) or name.rsplit("_", 1)[-1].upper()


def _kind(hint: Any) -> Any:
    """Return T of T, T | None, tuple[T, ...] and so on."""
    parts = () if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
    return _kind(parts[0]) if parts else hint


def choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a field of a type accepts; without a Literal none."""
    literals = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is typing.Literal]
    return typing.get_args(literals[0]) if literals else ()


def value_error(field: dataclasses.Field, value: object) -> ValueError | None:
    """Return the error for a value that a field cannot have, whatever the others are."""
    flag, auto, known = flag_of(field), f" or {AUTO}" * field.metadata["auto"], choices(field.type)
    if known and value not in (*known, field.default):
        return option_error(flag, value, f"must be {accepted(field.type)}")
    defaults = field.default if isinstance(field.default, tuple) else (field.default,)
    for number in value if isinstance(value, tuple) else (value,):
        if number == "" and "" not in defaults:
            return option_error(flag, "''", "must not be empty; omit the flag or give it a value")
        if not is_read(number, _kind(field.type)) and not (auto and number == AUTO):
            return option_error(flag, value, f"must be {accepted(field.type)}{auto}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            return option_error(flag, number, "must be a finite number")
        for name, bound in field.metadata["bounds"].items():
            if not _BOUNDS[name](number, bound):
                return option_error(flag, value, f"must be {name.replace('_', ' ')} {bound}")
    return None


_BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
