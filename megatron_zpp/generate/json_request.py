"""Requests in JSON: an object whose keys are the fields of a dataclass, and every refusal in one line."""

import difflib
import json
import typing
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.options import Options, fits, option, option_error

MOST_STOPS, LONGEST_STOP = 64, 256  # strings, characters: all are looked for after each token


def key(name: str, default: Any, help: str, **bounds: Any) -> Any:
    """A field whose errors name the key of the request."""
    return option(default, help, flag=name, **bounds)


def parse_object(body: bytes, example: str) -> dict[str, Any]:
    """Return the object of a request's body. Raises ValueError, in one line."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"the request is not a JSON object such as {example}")
    return content


def fields_of(
    content: Mapping[str, Any],
    cls: type[Options],
    unsupported: Mapping[str, tuple[tuple[Any, ...], str]],
    words: Mapping[Any, str],
) -> dict[str, Any]:
    """The values for the fields of `cls`, whose bounds `cls` itself checks.

    `unsupported` has keys with their values without effect, and what to do instead of another value. `words`
    says in words what a type is. Raises ValueError, in one line with the key, its value and what would be
    right.
    """
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for name, value in content.items():
        if name in unsupported:
            neutral, fix = unsupported[name]
            if value not in neutral:
                raise option_error(name, shown(value), fix)
            continue
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            known = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(hints)}"
            raise option_error(name, shown(value), f"no such key; {known}")
        value = _tuples(value)
        if not fits(value, hints[name]):
            raise option_error(name, shown(value), f"must be {_in_words(hints[name], words)}")
        given[name] = value
    return given


def check_stops(stops: tuple[str, ...]) -> None:
    """Refuse more or longer stop strings than can be looked for after each token."""
    if len(stops) > MOST_STOPS:
        raise option_error("stop", f"(list of {len(stops)})", f"at most {MOST_STOPS} strings")
    for number, text in enumerate(stops):
        if len(text) > LONGEST_STOP:
            fix = f"has {len(text)} characters; at most {LONGEST_STOP}"
            raise option_error(f"stop[{number}]", shown(text), fix)


def shown(value: Any) -> str:
    """Return a value as JSON, cut to a line's length."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _tuples(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(tuple(each) if isinstance(each, list) else each for each in value)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple[str, ...]: "a list of strings",
}


def _in_words(hint: Any, words: Mapping[Any, str]) -> str:
    if hint in words:
        return words[hint]
    if hint in _WORDS:
        return _WORDS[hint]
    (kind,) = (part for part in typing.get_args(hint) if part is not type(None))
    return _WORDS[kind]
