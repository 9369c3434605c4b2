"""Reads a tokenizer's files; an error names the flag, the file and the remedy."""

import json
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.storage.location import location
from megatron_zpp.storage.regular import UnfitFile, read_limited

# What a tokenizer's files are called in a checkpoint.
SENTENCEPIECE_MODEL = "tokenizer.model"
VOCAB, MERGES = "vocab.json", "merges.txt"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

LIMIT = 256 << 20  # bytes; a tokenizer.json of 260,000 entries has 33 MB


def read_bytes(flag: str, path: str, fix: str) -> bytes:
    """The file's bytes. Raises ValueError that names `flag`, `path` and `fix` when there are none to read."""
    try:
        content = read_limited(location(path), LIMIT)
    except ValueError as error:  # a URL that cannot be read
        raise option_error(flag, path, f"{error}; {fix}") from None
    except UnfitFile as error:
        raise option_error(flag, path, f"{error.strerror}; {fix}") from None
    except OSError as error:
        raise option_error(flag, path, f"cannot be read ({error.strerror}); {fix}") from None
    if not content:
        raise option_error(flag, path, f"is empty; {fix}")
    return content


def parse_json(text: bytes, flag: str, path: str, fix: str) -> dict[str, Any]:
    """The JSON object in `text`, the file's content. Raises ValueError as `read_bytes` does."""
    try:
        content = json.loads(text.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise option_error(flag, path, f"is not JSON; {fix}") from None
    if not isinstance(content, dict):
        raise option_error(flag, path, f"is not a JSON object; {fix}")
    return content
