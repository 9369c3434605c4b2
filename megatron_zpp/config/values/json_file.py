"""Reads a JSON object that a person wrote; errors name the flag, the file and the position."""

import json
import math
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.storage.regular import open_stream

LARGEST_FILE = 1 << 20  # bytes; a file of settings has a few thousand
DEEPEST = 20  # levels of nesting


def read_json_object(flag: str, path: str) -> dict[str, Any]:
    """Return the object in a file. Raises ValueError naming `flag`, `path` and the position of the error."""
    try:
        value = json.loads(
            _text(flag, path), object_pairs_hook=_without_duplicates, parse_int=_int, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise option_error(
            flag,
            path,
            f"line {error.lineno} column {error.colno}: not JSON ({error.msg}); JSON has no comments and no "
            "comma after the last value",
        ) from None
    except RecursionError:
        raise _too_deep(flag, path) from None
    except ValueError as error:
        raise option_error(flag, path, str(error)) from None
    if not isinstance(value, dict):
        raise option_error(flag, path, "must hold a JSON object, {…}")
    _check_values(flag, path, value)
    return value


def shown(value: Any) -> str:
    """Return a JSON value as one line of ASCII, cut to 58 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def shown_key(path: str) -> str:
    """Return the path of a key, escaped if it cannot be printed."""
    return path if path.isascii() and path.isprintable() and 0 < len(path) <= 100 else shown(path)


def _text(flag: str, path: str) -> str:
    try:
        with open_stream(path) as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise option_error(flag, path, f"cannot be read ({error.strerror}); name a JSON file") from None
    except ValueError as error:
        raise option_error(flag, shown(path), f"cannot be read ({error}); name a JSON file") from None
    if len(content) > LARGEST_FILE:
        raise option_error(flag, path, f"is longer than {LARGEST_FILE:,} bytes; name a JSON file of settings")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise option_error(flag, path, f"byte {error.start}: not UTF-8; name a JSON file") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {shown(key)} appears twice in one object; remove one")
        values[key] = value
    return values


def _int(digits: str) -> int | float:
    """Parse long integers as floats: Python is slow with thousands of digits and refuses more."""
    return int(digits) if len(digits) < 40 else float(digits)


def _constant(name: str) -> float:
    return float(name)


def _check_values(flag: str, path: str, value: dict[str, Any]) -> None:
    """Refuse numbers that are not finite and deep nesting; a loop, because recursion has a limit itself."""
    rest: list[tuple[str, dict[str, Any] | list[Any], int]] = [("", value, 1)]
    while rest:
        place, container, depth = rest.pop()
        if depth > DEEPEST:
            raise _too_deep(flag, path)
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, inner in items:
            inside = f"{place}.{key}" if place else str(key)
            if isinstance(inner, dict | list):
                rest.append((inside, inner, depth + 1))
            elif isinstance(inner, float) and not math.isfinite(inner):
                fix = f"{shown_key(inside)} {inner}: must be a finite number"
                raise option_error(flag, path, fix)


def _too_deep(flag: str, path: str) -> ValueError:
    return option_error(flag, path, f"is nested deeper than {DEEPEST} levels; name a JSON file of settings")
