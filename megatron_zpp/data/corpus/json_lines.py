"""Parses lines of JSON, and describes the problem of each line without a document."""

import json
from collections.abc import Iterator, Sequence

from megatron_zpp.data.corpus.problems import Problem

MALFORMED = "malformed line"
MISSING_KEY = "missing key"
NOT_TEXT = "value that is not text"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAY = "a JSON array, not an object; write each of its objects on one line: jq -c '.[]'"


class BadLine(Exception):
    """A line without a document; `kind` and `detail` as in Problem."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of a block. Only \\n ends a line, because JSON strings may contain other breaks."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def parse_lines(lines: Sequence[bytes], keys: Sequence[str]) -> Iterator[tuple[int, list[str]] | Problem]:
    """Yield for each nonblank line its number from 1 and its texts, one per key, or its problem."""
    for number, line in enumerate(lines, start=1):
        if not line.removeprefix(_BYTE_ORDER_MARK).strip():
            continue
        try:
            yield number, _parse(line, keys)
        except BadLine as bad:
            yield Problem(number, bad.kind, bad.detail)


def _parse(line: bytes, keys: Sequence[str]) -> list[str]:
    try:
        record = json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        raise BadLine(MALFORMED, utf16(line) or f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}"
        raise BadLine(MALFORMED, utf16(line) or _several_lines(line) or problem) from None
    except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
        raise BadLine(MALFORMED, f"not JSON that can be read: {error}") from None
    if isinstance(record, list):
        raise BadLine(MALFORMED, _ARRAY)
    if not isinstance(record, dict):
        raise BadLine(MALFORMED, f"not a JSON object but {_json_type(record)}")
    return [_text(record, key) for key in keys]


def utf16(content: bytes) -> str | None:
    """Say what to do with UTF-16 or UTF-32, each of which has null bytes; None for other content."""
    if b"\0" not in content:
        return None
    return "UTF-16 or UTF-32; convert the file to UTF-8: iconv -f UTF-16 -t UTF-8"


def _several_lines(line: bytes) -> str | None:
    """Say what to do with the first line of JSON that takes several lines; None for others."""
    first = line.strip()
    if first.startswith(b"["):
        return _ARRAY
    if first == b"{":
        return "an object on several lines; write each on one line: jq -c ."
    return None


def _text(record: dict[str, object], key: str) -> str:
    if key not in record:
        shown = ", ".join(map(repr, list(record)[:5])) or "none"
        raise BadLine(MISSING_KEY, f"no {key!r}; its keys: {shown}")
    text = record[key]
    if not isinstance(text, str):
        raise BadLine(NOT_TEXT, f"{key!r} is {_json_type(text)}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = f"\\u{ord(text[error.start]):04x}"
            raise BadLine(NOT_TEXT, f"{key!r} holds half a surrogate pair, {lone}") from None
    return text


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
