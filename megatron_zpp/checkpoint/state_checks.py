"""Checks that state.json, which may be damaged or another program's, is what `describe_state` returns."""

import math
from typing import Any

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.checkpoint.unit_entries import local_shape, row_count, split_of

_LIMIT = 2**48  # of any count of samples or elements
_MOST_DIMENSIONS = 8  # of a parameter
_LOSS_SCALE_KEYS = ("dynamic", "scale", "clean_steps", "patience")


def check_state(state: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError for a state that `describe_state` cannot have returned."""
    progress = Progress.from_json(state["progress"])
    if type(progress.run) is not str:
        raise ValueError(f"the run is called {progress.run!r}")
    numbers = [
        progress.iteration,
        progress.consumed_samples,
        progress.skipped_iterations,
        progress.skipped_samples,
        0 if progress.ordered_samples is None else progress.ordered_samples,
        state["optimizer_steps"],
    ]
    if not all(type(number) is int and 0 <= number < _LIMIT for number in numbers):
        raise ValueError("progress has values that are not numbers")
    if not (
        progress.skipped_iterations <= progress.iteration
        and progress.skipped_samples <= progress.consumed_samples
    ):
        raise ValueError("more steps were skipped than taken")
    if progress.dataset_progress and progress.dataset_progress.since > progress.consumed_samples:
        raise ValueError(f"its weights begin at sample {progress.dataset_progress.since}")
    for key, kind in (("with_optimizer", bool), ("tokenizer", dict), ("config", dict)):
        if type(state[key]) is not kind:
            raise ValueError(f"{key} is {state[key]!r}")
    if not all(type(kind) is str for kind in state.get("kinds", [])):
        raise ValueError(f"kinds is {state['kinds']!r}")
    _check_difference_formats(state.get("difference_formats"), len(state["units"]))
    if (scaling := state.get("product_scaling")) is not None:
        from megatron_zpp.model.fp8.scaling import check_scaling_state

        check_scaling_state(scaling)
    for name, buffer in state.get("buffers", {}).items():
        if buffer["dtype"] not in DTYPES.values() or not all(map(_is_count, buffer["shape"])):
            raise ValueError(f"buffer {name!r} is {_shown(buffer)}")
    scale = state["loss_scale"]
    if not all(isinstance(scale[key], int | float) for key in _LOSS_SCALE_KEYS):
        raise ValueError("loss_scale has values that are not numbers")
    ranks, nodes, tensor = sizes = state["ranks"], state.get("nodes", 1), state.get("tensor", 1)
    if not all(_is_count(size) and size > 0 for size in sizes):
        raise ValueError(f"ranks, nodes and tensor ranks are {_shown(sizes)}")
    if ranks % (nodes * tensor):
        raise ValueError(f"{ranks} ranks on {nodes} nodes, {tensor} of which share a layer")
    for unit in state["units"]:
        _check_unit(unit, tensor, ranks // tensor)
    _check_blocks(state["units"])


def _check_unit(unit: dict[str, Any], tensor: int, data_ranks: int) -> None:
    shard_numel = unit["shard_numel"]
    if not _is_count(shard_numel) or shard_numel == 0:
        raise ValueError(f"a shard has {_shown(shard_numel)} elements")
    if type(unit.get("frozen", False)) is not bool:
        raise ValueError(f"a unit is frozen: {_shown(unit['frozen'])}")
    for entry in unit["parameters"].values():
        shape, offset = entry["shape"], entry["offset"]
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"a parameter has {len(shape)} dimensions")
        if not all(map(_is_count, (*shape, offset))):
            raise ValueError(f"a parameter is {_shown(entry)}")
        rows, split = entry.get("rows"), split_of(entry)
        if rows is not None and (
            split is not None or len(rows) != 2 or not all(map(_is_count, rows)) or not shape
        ):
            raise ValueError(f"a parameter is {_shown(entry)}, which are no rows of a table")
        if split is not None and (
            tensor == 1  # written without
            or split.dim >= len(shape)
            or sum(split.runs) != shape[split.dim]
            or any(run % tensor for run in split.runs)
        ):
            raise ValueError(f"a parameter is {_shown(entry)}, which {tensor} tensor ranks cannot share")
        if offset + math.prod(local_shape(entry, tensor)) > shard_numel * data_ranks:
            raise ValueError(
                f"a parameter is {_shown(entry)} in {data_ranks} shards of {shard_numel} elements"
            )


def _check_blocks(units: list[dict[str, Any]]) -> None:
    """Raise ValueError unless blocks of rows make up their tables, and other parameters are in one unit."""
    blocks: dict[str, list[tuple[int, int]]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for unit in units:
        for name, entry in unit["parameters"].items():
            first, count = entry.get("rows") or (0, row_count(entry))
            blocks.setdefault(name, []).append((first, count))
            if entry["shape"] != entries.setdefault(name, entry)["shape"]:
                raise ValueError(f"{name} is {_shown(entry)} and {_shown(entries[name])}")
    for name, found in blocks.items():
        stop = 0
        for first, count in sorted(found):
            if first != stop:
                raise ValueError(f"the blocks of {name} have rows {_shown(sorted(found))}")
            stop += count
        if stop != row_count(entries[name]):
            raise ValueError(f"{name} is {_shown(entries[name])} in {stop} rows")


def _shown(value: Any) -> str:
    """A damaged value, which may be anything, in a line that can be read."""
    return f"{value!r:.200}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _check_difference_formats(state: Any, units: int) -> None:
    if state is None:
        return
    raised, measured = state["raised"], state["measured"]
    if not len(raised) == len(measured) == units or not all(type(unit) is bool for unit in raised):
        raise ValueError(f"difference_formats has {raised!r} raised")
    if not all(type(square) is float for squares in measured for square in squares):
        raise ValueError("difference_formats has measurements that are not numbers")
    if not all(len(squares) == 2 for squares in measured):
        raise ValueError("difference_formats has other than two sums per unit")
