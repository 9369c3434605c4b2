"""Numbers in words, for log lines and error messages."""

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: `1 rank`, `2 ranks`. `plural` is the noun with an s, unless given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def either(choices: Sequence[object]) -> str:
    """Return choices as `1, 2 or 4`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
