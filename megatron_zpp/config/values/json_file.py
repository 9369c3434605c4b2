"""Reads a JSON object that a person wrote; errors name the flag, the file and the position."""

import json
import math
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.storage.regular import read_limited

LARGEST_FILE = 1 << 20  # bytes; a file of settings has a few thousand


def read_json_object(flag: str, path: str) -> dict[str, Any]:
    """Return the object in a file. Raises ValueError naming `flag`, `path` and the position of the error."""
    problem = "must hold a JSON object, {…}"
    try:
        text = read_limited(path, LARGEST_FILE).decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_checked, parse_int=_int)
        if isinstance(value, dict):
            return value
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); name a JSON file"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start}: not UTF-8; name a JSON file"
    except json.JSONDecodeError as error:
        rule = "JSON has no comments and no comma after the last value"
        problem = f"line {error.lineno} column {error.colno}: not JSON ({error.msg}); {rule}"
    except RecursionError:
        problem = "is nested too deeply; name a JSON file of settings"
    except ValueError as error:
        problem = str(error)
    raise option_error(flag, path, problem)


def shown(value: Any) -> str:
    """Return a JSON value as one line of ASCII, cut to 58 characters."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "…"
    return text if len(text) <= 60 else f"{text[:57]}…"


def shown_key(path: str) -> str:
    """Return the path of a key, escaped if it cannot be printed."""
    return path if path.isascii() and path.isprintable() and 0 < len(path) <= 100 else shown(path)


def _checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError for a key that it has twice, or whose number is not finite."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {shown(key)} appears twice in one object; remove one")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{shown_key(key)} {number}: must be a finite number")
        values[key] = value
    return values


def _int(digits: str) -> int | float:
    """Parse long integers as floats: Python is slow with thousands of digits and refuses more."""
    return int(digits) if len(digits) < 40 else float(digits)
