"""PREFIX.checksums.json: checksums of PREFIX.idx and PREFIX.bin as they were written.

    {"files": {".idx": checksums, ".bin": checksums}, "sha256": "9f86d0…"}

`checksums` as in storage/checksums.py. `sha256` is the SHA-256 of `files` as JSON with sorted keys and
without spaces, so that damage to this file is not mistaken for damage to the data. Data from Megatron-LM has
no such file.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.storage.checksums import JSON_LIMIT, Checksums, DamagedFile
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.regular import read_limited

_FIX = "preprocess the data again, or remove this file to skip the check"


@dataclass(frozen=True)
class DataChecksums:
    index: Checksums
    tokens: Checksums


def checksums_path(prefix: str) -> str:
    return prefix + ".checksums.json"


def write_checksums(prefix: str, checksums: DataChecksums) -> None:
    """Replace PREFIX.checksums.json atomically. Raises OSError from the file system."""
    files = {".idx": checksums.index.to_json(), ".bin": checksums.tokens.to_json()}
    text = json.dumps({"files": files, "sha256": _digest(files)}, indent=1) + "\n"
    write_text(Path(checksums_path(prefix)), text)


def read_checksums(prefix: str) -> DataChecksums | None:
    """Return the checksums of a data set, None if it has none. Raises DamagedFile if they are not valid."""
    path = Path(checksums_path(prefix))
    try:
        content = read_limited(path, JSON_LIMIT)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
        files = found["files"]
        if found["sha256"] != _digest(files):
            raise ValueError("the SHA-256 of its contents differs")
        return DataChecksums(*(Checksums.from_json(files[name], path) for name in (".idx", ".bin")))
    except DamagedFile as damage:
        raise DamagedFile(f"{damage}; {_FIX}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFile(f"{path}: damaged ({reason}); {_FIX}") from None


def changed_since_written(prefix: str, damage: DamagedFile) -> DamagedFile:
    """Return `damage` to a file of a data set, with its remedy."""
    return DamagedFile(
        f"{damage}; preprocess the data again, or remove {checksums_path(prefix)} if another program wrote "
        "this data since"
    )


def _digest(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
