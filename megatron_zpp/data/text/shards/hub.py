"""Finds the files of a data set of the Hugging Face hub, which are read as shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.config.options import option_error
from megatron_zpp.config.values.text import HUB, JSON_LINES, PARQUET, plain_suffix
from megatron_zpp.data.text.shards.text import ShardedText, open_shards

_CHANGING = ("field", "filters", "columns")  # settings of a data set under which its files are not its rows
_CHECKED = "check name, configuration, split and network"


def open_hub(flag: str, name: str, key: str, directory: Path) -> ShardedText:
    """Open `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`, by default of the train split.

    NAME is a data set of the hub, or a directory with files of one, in Parquet or JSON lines. The column
    `key` holds the text. Raises ValueError if the data set, configuration, split or column does not exist, or
    if the data set has another format.
    """
    parts = name.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise option_error(flag, name, f"must be {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT")
    path, config, split = [*parts, "", ""][:3]
    path, _, revision = (path, "", "") if Path(path).exists() else path.partition("@")
    load = {"path": path, "name": config or None, "revision": revision or None}
    return open_shards(flag, name, _shards(flag, name, load, split or "train"), key, directory)


def _shards(flag: str, name: str, load: Mapping[str, Any], split: str) -> list[str]:
    """Return the files of a split, whose lines or rows are its rows."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise option_error(flag, name, "needs the package datasets; pip install datasets") from None
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(**load)
    except Exception as error:  # `datasets` passes on any error of its readers and the network
        what = f"cannot be read ({type(error).__name__}: {error})"
        raise option_error(flag, name, f"{what}; {_CHECKED}") from None
    files = {str(part): list(paths) for part, paths in (builder.config.data_files or {}).items()}
    wanted = [part.strip() for part in split.split("+")]
    found = [path for part in wanted for path in files.get(part, ())]
    parquet = builder.name == "parquet" and all(path.endswith(PARQUET) for path in found)
    lines = builder.name == "json" and all(plain_suffix(path) in JSON_LINES for path in found)
    if not (parquet or lines) or any(getattr(builder.config, setting, None) for setting in _CHANGING):
        fix = (
            "its files are not Parquet or JSON lines; most data sets have a version in Parquet, "
            f"{HUB}NAME@refs/convert/parquet, and in Python datasets.load_dataset(…).to_json(…) writes others"
        )
        raise option_error(flag, name, fix)
    if not set(wanted) <= files.keys():
        has = f"no split {split!r}; it has {', '.join(files)}"
        raise option_error(flag, name, f"cannot be read ({has}); {_CHECKED}")
    return found
