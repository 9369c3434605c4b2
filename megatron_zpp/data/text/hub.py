"""A data set of the Hugging Face hub as a source of text."""

import hashlib
import json
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.text import HUB
from megatron_zpp.data.text.sources import GROUP_BLOCKS, size_of_block

_LEAST_ROWS, _MOST_ROWS = 1, 1024
_GROUP_ROWS = 1 << 14
_PROBED = 16  # rows that tell a data set from another of the same name


class HubText:
    """The rows of `hf:NAME[:CONFIG[:SPLIT]]`, the train split where none is named.

    NAME is a data set of the hub, or a directory of files in a format of the hub's. `datasets` downloads it
    first, to a cache of its own, as only then any row is as near as the first; a row's JSON line is made of
    the column `key`.
    """

    def __init__(self, flag: str, name: str, key: str) -> None:
        """Raises ValueError when data set, configuration, split or column are not there."""
        self.name, self._key = name, key
        parts = name.removeprefix(HUB).split(":")
        if not parts[0] or len(parts) > 3:
            raise option_error(flag, name, f"must be {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT")
        self._rows = _load(flag, name, *parts)
        if key not in self._rows.column_names:
            there = ", ".join(self._rows.column_names)
            raise option_error("--json-key", key, f"{name} has no such column; it has {there}")
        self.size = rows = len(self._rows)
        if not rows:
            raise option_error(flag, name, "has no rows; name another split")
        self._rows_of_block = size_of_block(rows, _LEAST_ROWS, _MOST_ROWS)
        self.blocks = -(-rows // self._rows_of_block)
        self.group = max(GROUP_BLOCKS, _GROUP_ROWS // self._rows_of_block)
        probed = [self._rows[rows * index // _PROBED][key] for index in range(_PROBED)]
        digest = hashlib.sha256(json.dumps([*probed, self._rows[rows - 1][key]], default=str).encode())
        self.made_of = {"name": name, "rows": rows, "probed": digest.hexdigest()}

    def read(self, block: int) -> bytes:
        first = block * self._rows_of_block
        column = self._rows[first : first + self._rows_of_block][self._key]
        return b"".join(json.dumps({self._key: text}, default=str).encode() + b"\n" for text in column)

    def place(self, block: int, line: int) -> str:
        return f"{self.name} row {block * self._rows_of_block + line}"

    def describe(self, blocks: int) -> str:
        return f"about {len(self._rows) * blocks // self.blocks:,} of {len(self._rows):,} rows of text"


def _load(flag: str, name: str, path: str, config: str = "", split: str = "") -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise option_error(flag, name, "needs the package datasets; pip install datasets") from None
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # `datasets` lets through whatever its readers and the network raise
        fix = (
            f"cannot be read ({type(error).__name__}: {error}); check name, configuration, split and network"
        )
        raise option_error(flag, name, fix) from None
