"""PREFIX.tokenizer.json: a record of the tokenizer that made a data set."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.regular import read_limited

_LIMIT = 1 << 20  # bytes; a description has a few short values
# The most informative difference comes first.
KEYS = ("tokenizer_type", "vocab_size", "eod", "fingerprint")


def provenance_path(prefix: str) -> str:
    return prefix + ".tokenizer.json"


def write_provenance(prefix: str | Path, description: Mapping[str, Any]) -> None:
    """Atomically write `description`, which has at least `KEYS`, for PREFIX."""
    write_text(Path(provenance_path(str(prefix))), json.dumps(dict(description), indent=2) + "\n")


def check_provenance(prefix: str | Path, description: Mapping[str, Any]) -> None:
    """Raise ValueError if the record of PREFIX differs from the tokenizer described.

    A data set without a record, as Megatron-LM writes it, passes.
    """
    path = provenance_path(str(prefix))
    try:
        text = read_limited(path, _LIMIT)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; fix that, or preprocess the data again") from None
    try:
        recorded = json.loads(text)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or brackets nested too deeply
        raise ValueError(f"{path}: not JSON ({error}); preprocess the data again") from None
    if not isinstance(recorded, dict) or not all(key in recorded for key in KEYS):
        raise ValueError(f"{path}: not a JSON object with {', '.join(KEYS)}; preprocess the data again")
    differing = [key for key in KEYS if recorded[key] != description[key]]
    if differing:
        theirs, ours = (
            ", ".join(f"{key} {_shown(key, each[key])}" for key in differing)
            for each in (recorded, description)
        )
        raise ValueError(
            f"{path}: the data set was made with another tokenizer: {theirs}; --tokenizer-type "
            f"{description['tokenizer_type']} and its files give {ours}; use the tokenizer of the data"
        )


def _shown(key: str, value: Any) -> str:
    return str(value)[:12] if key == "fingerprint" else str(value)
