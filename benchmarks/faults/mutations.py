"""Small changes to bytes and to JSON values, as hypothesis strategies that it can shrink."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = (0, 1, -1, 2, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63), 2**64 - 1)
_DEEP = "[" * 5_000 + "]" * 5_000
_JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "é\n", "../x", "\0", [], {}, [None], {"": None}),
    *NUMBERS,
    *(0.5, -1.5, 1e308, float("nan"), float("inf"), 10**400, "9" * 5_000, _DEEP),
)
_PLACES = st.integers(0, 2**32 - 1)  # of a byte or a node, modulo how many there are
_BYTE_CHANGES = ("flip", "set", "cut", "remove", "insert", "repeat", "number")
_JSON_CHANGES = ("replace", "replace", "replace", "remove", "rename", "repeat", "wrap", "move")

ByteChange = tuple[str, int, int]
JsonChange = tuple[str, int, int]


def changes_of_bytes() -> st.SearchStrategy[list[ByteChange]]:
    """One to four changes for `change_bytes`."""
    return st.lists(st.tuples(st.sampled_from(_BYTE_CHANGES), _PLACES, _PLACES), min_size=1, max_size=4)


def changes_of_json() -> st.SearchStrategy[list[JsonChange]]:
    """One to three changes for `change_json`."""
    return st.lists(st.tuples(st.sampled_from(_JSON_CHANGES), _PLACES, _PLACES), min_size=1, max_size=3)


def change_bytes(content: bytes, changes: list[ByteChange]) -> bytes:
    """`content` after changes."""
    changed = bytearray(content)
    for kind, place, value in changes:
        at = place % (len(changed) + 1)
        if kind == "cut":
            del changed[at:]
        elif kind == "insert":
            changed[at:at] = value.to_bytes(4, "little")[: 1 + value % 4]
        elif kind == "remove":
            del changed[at : at + 1 + value % 64]
        elif kind == "repeat":
            changed[at:at] = changed[at : at + 1 + value % 256]
        elif kind == "number":
            number = NUMBERS[value % len(NUMBERS)] % 2**64
            changed[at : at + 8] = number.to_bytes(8, "little")[: max(len(changed) - at, 1)]
        elif at < len(changed):
            changed[at] = changed[at] ^ 1 << value % 8 if kind == "flip" else value % 256
    return bytes(changed)


def change_json(value: Any, changes: list[JsonChange]) -> str:
    """The text of a JSON value after changes; it may hold what `json` alone writes, as NaN."""
    root = [copy.deepcopy(value)]
    for kind, place, choice in changes:
        nodes = list(_nodes(root))
        container, key = nodes[place % len(nodes)]
        if kind == "replace":
            container[key] = copy.deepcopy(_JSON_VALUES[choice % len(_JSON_VALUES)])
        elif kind == "remove" and container is not root:
            del container[key]
        elif kind == "rename" and isinstance(container, dict):
            container[str(_JSON_VALUES[choice % len(_JSON_VALUES)])[:50]] = container.pop(key)
        elif kind == "repeat" and isinstance(container, list) and container is not root:
            container[key:key] = [copy.deepcopy(container[key])] * (1 + choice % 5)
        elif kind == "wrap":
            container[key] = [container[key]]
        elif kind == "move":
            other, other_key = nodes[choice % len(nodes)]
            container[key] = copy.deepcopy(other[other_key])
    return json.dumps(root[0]).replace(json.dumps(_DEEP), _DEEP) if root else ""


def _nodes(container: Any) -> Any:
    """Every (container, key) below a list or dictionary."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _nodes(container[key])
