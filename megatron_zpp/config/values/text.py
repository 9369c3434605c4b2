"""Which data paths name text, which a run tokenises as it reads, and which name tokenised data."""

import glob
import os
import re

JSON_LINES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".gz", ".zst")  # of compressed files
PARQUET = ".parquet"
HUB = "hf:"  # prefix of the name of a Hugging Face data set


def plain_suffix(path: str) -> str:
    """Return the suffix of a name without its compression: `.jsonl` for `a.jsonl.gz`."""
    stem, suffix = os.path.splitext(path)
    return os.path.splitext(stem)[1] if suffix in SUFFIXES else suffix


def is_hub(path: str) -> bool:
    """Return whether a path names a Hugging Face data set."""
    return path.startswith(HUB)


def looks_like_hub(path: str) -> bool:
    """Return whether a path has the form of a Hugging Face data set's name: NAME, or OWNER/NAME."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def is_text(path: str) -> bool:
    """Return whether a path names text instead of tokenised data."""
    return is_hub(path) or plain_suffix(path) in JSON_LINES or path.endswith(PARQUET)


def is_sharded(path: str) -> bool:
    """Return whether a path of text that is not of the hub is a glob of shards, or a Parquet file."""
    return path.endswith(PARQUET) or (glob.has_magic(path) and not os.path.exists(path))


def fixed_directory(pattern: str) -> str:
    """Return the directories of a glob before its first wildcard: `a/b` for `a/b/*/*.parquet`."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern
