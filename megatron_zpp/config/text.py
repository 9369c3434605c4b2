"""Which names of data stand for text, that a run tokenises as it reads."""

import os
import re

JSON_LINES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".gz", ".zst")  # of what is compressed
HUB = "hf:"  # before the name of a Hugging Face data set


def plain_suffix(path: str) -> str:
    """What a name ends in, with its compression taken off: `.jsonl` of `a.jsonl.gz`."""
    stem, suffix = os.path.splitext(path)
    return os.path.splitext(stem)[1] if suffix in SUFFIXES else suffix


def is_hub(path: str) -> bool:
    """Whether it names a Hugging Face data set."""
    return path.startswith(HUB)


def looks_like_hub(path: str) -> bool:
    """Whether a Hugging Face data set may have this name: NAME, or OWNER/NAME."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def is_text(path: str) -> bool:
    """Whether it names text, and no data set that is tokenised already."""
    return is_hub(path) or plain_suffix(path) in JSON_LINES
