"""A data set of the Hugging Face hub as a source of text."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import HUB, JSON_LINES, PARQUET, plain_suffix
from megatron_zpp.data.samples import ShardRecord
from megatron_zpp.data.text.group_order import GroupOrder
from megatron_zpp.data.text.shards.files import first_bytes
from megatron_zpp.data.text.shards.parquet import json_line
from megatron_zpp.data.text.shards.text import open_shards
from megatron_zpp.data.text.sources import GROUP_BLOCKS, TextSource, size_of_block

_LEAST_ROWS, _MOST_ROWS = 1, 1024
_GROUP_ROWS = 1 << 14
_PROBED = 16  # rows that distinguish a data set from others of the same name
_CHANGING = ("field", "filters", "columns")  # settings of a data set under which its files are not its rows
_CHECKED = "check name, configuration, split and network"


def open_hub(flag: str, name: str, key: str, directory: Path, say: Callable[[str], None]) -> TextSource:
    """Open `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`, by default of the train split.

    NAME is a data set of the hub, or a directory of files in one of its formats. Parquet and JSON lines are
    read as shards; of other formats `datasets` first downloads the whole data set, and `say` gets a line. The
    column `key` holds the text. Raises ValueError if the data set, configuration, split or column does not
    exist.
    """
    parts = name.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise option_error(flag, name, f"must be {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT")
    path, config, split = [*parts, "", ""][:3]
    path, _, revision = (path, "", "") if os.path.exists(path) else path.partition("@")
    load = {"path": path, "name": config or None, "revision": revision or None}
    files = _shards(flag, name, load, split or "train")
    if files:
        return open_shards(flag, name, files, key, directory)
    say(f"{name} has a format that cannot be streamed; `datasets` downloads all of it before the first step")
    return HubText(flag, name, _download(flag, name, load, split or "train"), key)


class HubText:
    """The rows of a data set that `datasets` holds on this machine; the column `key` becomes JSON lines."""

    def __init__(self, flag: str, name: str, rows: Any, key: str) -> None:
        """Raise ValueError if there is no such column, or no row."""
        self.name, self._key, self._rows = name, key, rows
        if key not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise option_error("--json-key", key, f"{name} has no such column; it has {columns}")
        self.size = count = len(rows)
        if not count:
            raise option_error(flag, name, "has no rows; name another split")
        self._rows_of_block = size_of_block(count, _LEAST_ROWS, _MOST_ROWS)
        self.blocks = -(-count // self._rows_of_block)
        self.group = max(GROUP_BLOCKS, _GROUP_ROWS // self._rows_of_block)
        probed = [rows[count * index // _PROBED][key] for index in range(_PROBED)]
        digest = hashlib.sha256(json.dumps([*probed, rows[count - 1][key]], default=str).encode())
        self.made_of: Mapping[str, Any] = {"name": name, "rows": count, "probed": digest.hexdigest()}
        kind = getattr(rows.features[key], "dtype", "")
        if kind not in ("string", "large_string"):
            self.made_of = {**self.made_of, "column": kind}

    def order(self, first: int, last: int, seq_length: int, seed: int) -> GroupOrder:
        return GroupOrder(first, last, self.group, seed)

    def read(self, block: int) -> bytes:
        first = block * self._rows_of_block
        column = self._rows[first : first + self._rows_of_block][self._key]
        return b"".join(json_line(self._key, text) for text in column)

    def location(self, block: int, line: int) -> str:
        return f"{self.name} row {block * self._rows_of_block + line}"

    def describe(self, blocks: int) -> str:
        return f"about {len(self._rows) * blocks // self.blocks:,} of {len(self._rows):,} rows of text"

    def shard_records(self) -> tuple[ShardRecord, ...]:
        return ()


def _shards(flag: str, name: str, load: Mapping[str, Any], split: str) -> list[str]:
    """Return the files of a split if their lines or rows are its rows; otherwise none."""
    datasets = _datasets(flag, name)
    try:
        builder = datasets.load_dataset_builder(**load)
    except Exception as error:  # `datasets` passes on any error of its readers and the network
        raise option_error(flag, name, f"cannot be read ({_shown(error)}); {_CHECKED}") from None
    files = {str(part): list(paths) for part, paths in (builder.config.data_files or {}).items()}
    if any(getattr(builder.config, setting, None) for setting in _CHANGING):
        return []
    if files and split.isidentifier() and split not in files:
        has = f"no split {split!r}; it has {', '.join(files)}"
        raise option_error(flag, name, f"cannot be read ({has}); {_CHECKED}")
    found = [path for part in split.split("+") for path in files.get(part.strip(), ())]
    if split.count("+") + 1 != len([part for part in split.split("+") if part.strip() in files]):
        return []
    if builder.name == "parquet" and all(path.endswith(PARQUET) for path in found):
        return found
    lines = builder.name == "json" and all(plain_suffix(path) in JSON_LINES for path in found)
    # A file may also be one list of objects, which `datasets` reads.
    return found if lines and not any(first_bytes(flag, path, 1) == b"[" for path in found[:1]) else []


def _download(flag: str, name: str, load: Mapping[str, Any], split: str) -> Any:
    try:
        return _datasets(flag, name).load_dataset(**load, split=split)
    except Exception as error:  # `datasets` passes on any error of its readers and the network
        raise option_error(flag, name, f"cannot be read ({_shown(error)}); {_CHECKED}") from None


def _datasets(flag: str, name: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise option_error(flag, name, "needs the package datasets; pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
