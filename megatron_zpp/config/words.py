"""Numbers in words, for log lines and error messages."""

import difflib
from collections.abc import Iterable, Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: `1 rank`, `2 ranks`. `plural` is the noun with an s, unless given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def either(choices: Sequence[object]) -> str:
    """Return choices as `1, 2 or 4`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.8) -> str:
    """Return `did you mean X?` for the known word that is most like a wrong one, or nothing."""
    close = difflib.get_close_matches(word, [*known], n=1, cutoff=likeness)
    return f"did you mean {close[0]}?" if close else ""


def duration(seconds: float) -> str:
    """Return a time in the unit that a person reads: `350 ms`, `24.7 s`, `12.5 min`, `2.1 h`, `85 days`."""
    for unit, size, limit in _DURATIONS:
        if seconds < limit:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / _YEAR)} years"


def decimal_bytes(number: float) -> str:
    """Return bytes in powers of 1,000, as links count them: `7.61 GB`, `601 GB`, `1.22 TB`."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if number < 999.5:
            return f"{_three(number)} {unit}"
        number /= 1000
    return f"{_three(number)} PB"


_YEAR = 365 * 86400
_DURATIONS = (
    ("ms", 1e-3, 0.9995),
    ("s", 1, 99.95),
    ("min", 60, 5997),
    ("h", 3600, 2 * 86400),
    ("days", 86400, 2 * _YEAR),
)


def _three(number: float) -> str:
    """Return a number with three digits, or all digits before the point if these are more."""
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
