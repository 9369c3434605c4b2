"""A data set of the Hugging Face hub as a source of text."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.text import HUB
from megatron_zpp.data.text.sources import GROUP_BLOCKS, size_of_block

_LEAST_ROWS, _MOST_ROWS = 1, 1024
_GROUP_ROWS = 1 << 14
_PROBED = 16  # rows that distinguish a data set from others of the same name


class HubText:
    """The rows of `hf:NAME[:CONFIG[:SPLIT]]`, by default of the train split.

    NAME is a data set of the hub, or a directory of files in one of its formats. `datasets` first downloads
    the data set to its cache, because only then can any row be read as fast as the first. The column `key`
    becomes the row's JSON line.
    """

    def __init__(self, flag: str, name: str, key: str) -> None:
        """Raise ValueError if the data set, configuration, split or column does not exist."""
        self.name, self._key = name, key
        parts = name.removeprefix(HUB).split(":")
        if not parts[0] or len(parts) > 3:
            raise option_error(flag, name, f"must be {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT")
        self._rows = _load(flag, name, *parts)
        if key not in self._rows.column_names:
            columns = ", ".join(self._rows.column_names)
            raise option_error("--json-key", key, f"{name} has no such column; it has {columns}")
        self.size = rows = len(self._rows)
        if not rows:
            raise option_error(flag, name, "has no rows; name another split")
        self._rows_of_block = size_of_block(rows, _LEAST_ROWS, _MOST_ROWS)
        self.blocks = -(-rows // self._rows_of_block)
        self.group = max(GROUP_BLOCKS, _GROUP_ROWS // self._rows_of_block)
        probed = [self._rows[rows * index // _PROBED][key] for index in range(_PROBED)]
        digest = hashlib.sha256(json.dumps([*probed, self._rows[rows - 1][key]], default=str).encode())
        self.made_of: Mapping[str, Any] = {"name": name, "rows": rows, "probed": digest.hexdigest()}

    def read(self, block: int) -> bytes:
        first = block * self._rows_of_block
        column = self._rows[first : first + self._rows_of_block][self._key]
        return b"".join(json.dumps({self._key: text}, default=str).encode() + b"\n" for text in column)

    def location(self, block: int, line: int) -> str:
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
    except Exception as error:  # `datasets` passes on any error of its readers and the network
        fix = (
            f"cannot be read ({type(error).__name__}: {error}); check name, configuration, split and network"
        )
        raise option_error(flag, name, fix) from None
