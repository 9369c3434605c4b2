"""Values of Hugging Face's config.json, whose errors name the key."""

import math
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.values.json_file import shown

CONFIG = "config.json"
Values = Mapping[str, Any]


def unfit(key: str, value: Any, must_be: str) -> ValueError:
    """The error for a value of the wrong kind."""
    return ValueError(f"{CONFIG}: {key} is {shown(value)}; must be {must_be}")


def unsupported(key: str, value: Any, must_be: str) -> ValueError:
    """The error for a value that no flag expresses."""
    return ValueError(f"{CONFIG}: {key} {shown(value)} is not supported; must be {must_be}")


def positive(values: Values, key: str, usual: float | None = None, *, of: str = "") -> float:
    """A number above 0; `usual` where there is none, unless that is None. `of` is for the error."""
    value = values.get(key, usual)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise unfit(f"{key}{of}", value, "a number above 0")
    return float(value)


def switch(values: Values, key: str, usual: bool) -> bool:
    """True or false; `usual` where there is no key."""
    value = values.get(key, usual)
    if type(value) is not bool:
        raise unfit(key, value, "true or false")
    return value


def whole(values: Values, key: str, usual: int, *, least: int, must_be: str) -> int:
    """A whole number of at least `least`; `usual` where there is no key."""
    value = values.get(key, usual)
    if type(value) is not int or value < least:
        raise unfit(key, value, must_be)
    return value


def mapping(values: Values, key: str, name: str) -> dict[str, Any]:
    """An object, which is empty where there is none. `name` is for the error."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise unfit(name, value, "an object")
    return value
