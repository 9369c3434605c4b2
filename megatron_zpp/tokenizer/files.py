"""Reads a tokenizer's files; an error names the flag, the file and the remedy."""

import json
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.storage.regular import UnfitFile, read_limited

LIMIT = 256 << 20  # bytes; a tokenizer.json of 260,000 entries has 33 MB


def read_bytes(flag: str, path: str, fix: str) -> bytes:
    """The file's bytes. Raises ValueError that names `flag`, `path` and `fix` when there are none to read."""
    try:
        content = read_limited(path, LIMIT)
    except UnfitFile as error:
        raise option_error(flag, path, f"{error.strerror}; {fix}") from None
    except OSError as error:
        raise option_error(flag, path, f"cannot be read ({error.strerror}); {fix}") from None
    if not content:
        raise option_error(flag, path, f"is empty; {fix}")
    return content


def read_json(flag: str, path: str, fix: str) -> dict[str, Any]:
    """The file's JSON object. Raises ValueError that names `flag`, `path` and `fix` when it holds none."""
    try:
        content = json.loads(read_bytes(flag, path, fix).decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise option_error(flag, path, f"is not JSON; {fix}") from None
    if not isinstance(content, dict):
        raise option_error(flag, path, f"is not a JSON object; {fix}")
    return content
