"""Refuses a checkpoint of another model or tokenizer than the run's."""

from typing import Any

from megatron_zpp.checkpoint.unit_entries import split_of
from megatron_zpp.storage.object_path import Location
from megatron_zpp.tokenizer.base import in_words


def check_tokenizer(path: Location, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Raise ValueError unless both tokenizers are the same."""
    if saved != present:
        raise ValueError(
            f"{path}: was trained with {in_words(saved)}, this run has {in_words(present)}; give the "
            "tokenizer flags of that run"
        )


def check_units(path: Location, saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    """Raise ValueError unless both have the same whole parameters; layouts and tensor ranks may differ."""
    theirs, ours = (
        {name: entry for unit in units for name, entry in unit["parameters"].items()}
        for units in (saved, present)
    )
    for name in sorted(theirs.keys() ^ ours.keys()):
        where = "missing from it" if name in ours else "not part of this model"
        raise ValueError(f"{path}: {name} is {where}; use the model flags that it was saved with")
    for name, entry in ours.items():
        saved_split, split = split_of(theirs[name]), split_of(entry)
        if saved_split and split and saved_split.dim != split.dim:
            raise ValueError(
                f"{path}: {name} is split along dimension {saved_split.dim}, and this model splits dimension "
                f"{split.dim}; load it without tensor parallelism, and save it again"
            )
        if theirs[name]["shape"] != entry["shape"]:
            shapes = tuple(theirs[name]["shape"]), tuple(entry["shape"])
            raise ValueError(
                f"{path}: {name} has shape {shapes[0]}, this model needs {shapes[1]}; use the model flags "
                "that it was saved with"
            )
