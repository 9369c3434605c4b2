"""PREFIX.checksums.json: what PREFIX.idx and PREFIX.bin were when they were written.

    {"files": {".idx": checksums, ".bin": checksums}, "sha256": "9f86d0…"}

checksums as in storage/checksums.py; `sha256` is that of `files` as JSON with sorted keys and no spaces, so
that damage to this file is not taken for damage to the data. Data that Megatron-LM wrote has no such file.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.storage.checksums import JSON_LIMIT, Checksums, DamagedFile
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.regular import read_limited

_FIX = "preprocess the data again, or remove this file to go without it"


@dataclass(frozen=True)
class DataChecksums:
    """Of a data set's two files."""

    index: Checksums
    tokens: Checksums


def checksums_path(prefix: str) -> str:
    """PREFIX.checksums.json."""
    return prefix + ".checksums.json"


def write_checksums(prefix: str, checksums: DataChecksums) -> None:
    """Replaces PREFIX.checksums.json in one step. Raises OSError as the file system does."""
    files = {".idx": checksums.index.to_json(), ".bin": checksums.tokens.to_json()}
    text = json.dumps({"files": files, "sha256": _digest(files)}, indent=1) + "\n"
    write_text(Path(checksums_path(prefix)), text)


def read_checksums(prefix: str) -> DataChecksums | None:
    """The checksums of a data set; None when it has none. Raises DamagedFile for a file that is none."""
    path = Path(checksums_path(prefix))
    try:
        content = read_limited(path, JSON_LIMIT)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
        files = found["files"]
        if found["sha256"] != _digest(files):
            raise ValueError("its own SHA-256 differs")
        return DataChecksums(*(Checksums.from_json(files[name], path) for name in (".idx", ".bin")))
    except DamagedFile as damage:
        raise DamagedFile(f"{damage}; {_FIX}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFile(f"{path}: damaged ({reason}); {_FIX}") from None


def _digest(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
