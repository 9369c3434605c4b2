"""Parses lines of JSON, and says which lines have no document and why: the first few, and how many."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MALFORMED = "malformed line"
MISSING_KEY = "missing key"
NOT_TEXT = "value that is not text"

KEPT = 5  # with a wrong --json-key every line is a problem
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAY = "a JSON array, not an object; write each of its objects on one line: jq -c '.[]'"


@dataclass(frozen=True)
class Problem:
    """One line without a document."""

    line: int  # from 1
    kind: str  # problems are counted by kind
    detail: str


class Report:
    """All problems of a run: shows the first few at once, or stops at the first, and sums them up."""

    def __init__(self, say: Callable[[str], None], *, strict: bool = False) -> None:
        self._say, self._strict = say, strict
        self._counts: Counter[str] = Counter()
        self._shown = 0

    def add(self, problems: Sequence[Problem], path: str, before: int = 0) -> None:
        """Add problems of a file, with `before` lines before those that the problems count.

        A strict report raises ValueError for the first problem.
        """
        for problem in problems[: KEPT - self._shown]:
            line = f"{path} line {before + problem.line}: {problem.kind}: {problem.detail}"
            if self._strict:
                raise ValueError(f"{line}; correct the line, or omit --strict")
            self._say(f"skipped: {line}")
            self._shown += 1
        self._counts.update(problem.kind for problem in problems)

    def summary(self) -> str:
        """Return, for example, `3 × malformed line, 1 × missing key`; `nothing` without problems."""
        kinds = (f"{count:,} × {kind}" for kind, count in self._counts.most_common())
        return ", ".join(kinds) or "nothing"


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of a block. Only \\n ends a line, because JSON strings may contain other breaks."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def parse_lines(
    lines: Sequence[bytes], keys: Sequence[str], *, first: int = 1
) -> Iterator[tuple[int, list[str]] | Problem]:
    """Yield for each nonblank line its number, from `first`, and its texts, one per key, or its problem."""
    for number, line in enumerate(lines, start=first):
        if not line.removeprefix(_BYTE_ORDER_MARK).strip():
            continue
        yield _parse(number, line, keys)


def _parse(number: int, line: bytes, keys: Sequence[str]) -> tuple[int, list[str]] | Problem:
    problem = None
    try:
        record = json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        problem = utf16(line) or f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        said = f"not JSON: {error.msg} at column {error.colno}"
        problem = utf16(line) or _several_lines(line) or said
    except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
        problem = f"not JSON that can be read: {error}"
    else:
        if isinstance(record, list):
            problem = _ARRAY
        elif not isinstance(record, dict):
            problem = f"not a JSON object but {_json_type(record)}"
    if problem:
        return Problem(number, MALFORMED, problem)
    for key in keys:
        if key not in record:
            shown = ", ".join(map(repr, list(record)[:5])) or "none"
            return Problem(number, MISSING_KEY, f"no {key!r}; its keys: {shown}")
        if problem := _not_text(record[key]):
            return Problem(number, NOT_TEXT, f"{key!r} {problem}")
    return number, [record[key] for key in keys]


def utf16(content: bytes) -> str | None:
    """Say what content with null bytes is, which UTF-16, UTF-32 and binary files have; None without them."""
    if b"\0" not in content:
        return None
    return "null bytes: UTF-16 or UTF-32, which iconv -f UTF-16 -t UTF-8 converts, or not text at all"


def _several_lines(line: bytes) -> str | None:
    """Say what to do with the first line of JSON that takes several lines; None for others."""
    first = line.strip()
    if first.startswith(b"["):
        return _ARRAY
    if first == b"{":
        return "an object on several lines; write each on one line: jq -c ."
    return None


def _not_text(value: object) -> str | None:
    """Say why a value is not text; None if it is."""
    if not isinstance(value, str):
        return f"is {_json_type(value)}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"holds half a surrogate pair, \\u{ord(value[error.start]):04x}"
    return None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
