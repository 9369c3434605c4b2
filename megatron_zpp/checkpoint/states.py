"""The states of an engine and a run that a checkpoint contains, and checks of state.json.

Files contain shards as the ranks have them: `weights/unit_3` is one rank's shard of unit 3's flat buffer.
The offset of a parameter in a flat buffer depends on the model and on the largest quantisation block of the
run, and is stored in state.json. A rank of another run reads the slices of parameters that it owns from the
shards that contain them. At stage 0 every rank writes an equal part of the states, which all ranks have.
Of a split parameter, a flat buffer has one tensor rank's part; of others each tensor rank saves a copy.

state.json contains the rest:
    progress, with_optimizer, optimizer_steps, loss_scale, tokenizer, config
    ranks, nodes, tensor   the grid of the run: ranks of the job, each with a file, and T tensor ranks.
             Rank `owner_of`(s) · T + j has shard s of tensor rank j (`Grid.data`). Without `tensor`, in older
             versions, T is 1; without `nodes`, in still older ones, rank r owns shard r
    units    for each unit: `shard_numel`, elements of a shard; by name `parameters`: `shape` of the whole
             parameter, `offset` of a tensor rank's part, and `split` into parts, if it is (`Split`). Where
             units have blocks of rows of a table, each names the table and its whole `shape`, and `rows` has
             the block's first row and how many there are; absent in versions before 7
    kinds    states in the files for each unit: `engine.states.kinds`, or `weights` only; absent in older
             versions, which had the weights and, if `with_optimizer`, AdamW's moments
    difference_formats   which units send weight differences in 8 bits next, and what decides on the step
             after: `raised` and `measured` by unit; null where the run sends none, absent in older versions
    product_scaling   by linear map, what the scales of 8-bit products follow from (model/fp8_scaling.py);
             null with other recipes and before the first step, absent in older versions
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.slices import Sharing
from megatron_zpp.data.dataset_progress import DatasetProgress
from megatron_zpp.distributed.split import RowBlock, Split
from megatron_zpp.model.fp8_scaling import check_scaling_state
from megatron_zpp.model.product_algorithms import ProductAlgorithms
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.model_states import WEIGHTS

_LIMIT = 2**48  # of any count of samples or elements
_MOST_DIMENSIONS = 8  # of a parameter
_LOSS_SCALE_KEYS = ("dynamic", "scale", "clean_steps", "patience")


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Dropout and data order follow from the seed and these counts.

    `run` is the run's name in logs, which a resumed run keeps. `dataset_progress` is how far the run has read
    each of its data sets; None if it reads none. `skipped_iterations` and `skipped_samples` count steps that
    did not change the weights; they are 0 in checkpoints of older versions. `ordered_samples` is the number
    of samples for which Megatron-LM's order was built; None for other orders, and in older versions.
    `products` are the algorithms of matrix products; None unless they were measured, and in older versions.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    skipped_samples: int = 0
    ordered_samples: int | None = None
    run: str = ""
    dataset_progress: DatasetProgress | None = None
    products: ProductAlgorithms | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Progress":
        """The inverse of `asdict`. Raises ValueError, KeyError or TypeError for other values."""
        value = dict(value)
        if "standing" in value:  # its name in format version 2
            value["dataset_progress"] = value.pop("standing")
        for name, kind in (("dataset_progress", DatasetProgress), ("products", ProductAlgorithms)):
            if value.get(name) is not None:
                value[name] = kind.from_json(value[name])
        return cls(**value)


def tensor_name(kind: str, unit: int) -> str:
    """The name of a unit's shard in a rank's file."""
    return f"{kind}/unit_{unit}"


def saved_kinds(engine: ZeroEngine, *, with_optimizer: bool) -> tuple[str, ...]:
    """The kinds of states that a checkpoint has of each unit."""
    return engine.states.kinds if with_optimizer else (WEIGHTS,)


def shards_of(engine: ZeroEngine, *, with_optimizer: bool) -> dict[str, Tensor]:
    """This rank's shards by name: the engine's memory, which optimizer steps change, not copies."""
    kinds = saved_kinds(engine, with_optimizer=with_optimizer)
    return {
        tensor_name(kind, index): shard
        for kind in kinds
        for index, shard in enumerate(engine.states.shards(kind))
    }


def describe_state(
    engine: ZeroEngine,
    progress: Progress,
    *,
    with_optimizer: bool,
    config: dict[str, Any],
    tokenizer: dict[str, Any],
) -> dict[str, Any]:
    """The content of state.json; every rank must call it. Waits for the device."""
    return describe_state_of(
        progress,
        with_optimizer=with_optimizer,
        optimizer_steps=engine.states.optimizer_steps,
        loss_scale=engine.loss_scale.state(),
        ranks=engine.topology.world_size,
        nodes=engine.topology.nodes,
        tensor=engine.grid.tensor,
        units=describe_units(engine),
        kinds=saved_kinds(engine, with_optimizer=with_optimizer),
        difference_formats=engine.states.difference_formats() if with_optimizer else None,
        product_scaling=engine.scaling.state() if with_optimizer and engine.scaling else None,
        tokenizer=tokenizer,
        config=config,
    )


def describe_state_of(
    progress: Progress,
    *,
    with_optimizer: bool,
    optimizer_steps: int,
    loss_scale: dict[str, float],
    ranks: int,
    nodes: int,
    units: list[dict[str, Any]],
    kinds: Sequence[str],
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    difference_formats: dict[str, Any] | None = None,
    product_scaling: dict[str, Any] | None = None,
    tensor: int = 1,
) -> dict[str, Any]:
    """The content of state.json, for a program without an engine."""
    return {
        "progress": asdict(progress),
        "with_optimizer": with_optimizer,
        "optimizer_steps": optimizer_steps,
        "loss_scale": loss_scale,
        "ranks": ranks,
        "nodes": nodes,
        "tensor": tensor,
        "units": units,
        "kinds": list(kinds),
        "difference_formats": difference_formats,
        "product_scaling": product_scaling,
        "tokenizer": tokenizer,
        "config": config,
    }


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
    check_scaling_state(state.get("product_scaling"))
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
            first, count = entry.get("rows") or (0, _rows(entry))
            blocks.setdefault(name, []).append((first, count))
            if entry["shape"] != entries.setdefault(name, entry)["shape"]:
                raise ValueError(f"{name} is {_shown(entry)} and {_shown(entries[name])}")
    for name, found in blocks.items():
        stop = 0
        for first, count in sorted(found):
            if first != stop:
                raise ValueError(f"the blocks of {name} have rows {_shown(sorted(found))}")
            stop += count
        if stop != _rows(entries[name]):
            raise ValueError(f"{name} is {_shown(entries[name])} in {stop} rows")


def _rows(entry: Mapping[str, Any]) -> int:
    """Rows of the whole parameter; 1 of a scalar."""
    return entry["shape"][0] if entry["shape"] else 1


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


def formats_of_units(
    state: dict[str, Any] | None, saved: list[dict[str, Any]], present: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The `difference_formats` of `saved` units for the `present` units, which may be others.

    A unit takes after every saved unit of which it has a parameter, or rows of one.
    """
    if state is None:
        return None
    places: dict[str, list[tuple[range, int]]] = {}
    for index, unit in enumerate(saved):
        for name, entry in unit["parameters"].items():
            places.setdefault(name, []).append((rows_of(entry), index))
    origins = [
        {
            index
            for name, entry in unit["parameters"].items()
            for rows, index in places[name]
            if max(rows.start, rows_of(entry).start) < min(rows.stop, rows_of(entry).stop)
        }
        for unit in present
    ]
    return {
        "raised": [any(state["raised"][unit] for unit in units) for units in origins],
        "measured": [
            [sum(squares) for squares in zip(*(state["measured"][unit] for unit in units), strict=True)]
            for units in origins
        ],
    }


def sharing_of(engine: ZeroEngine) -> Sharing:
    """How the engine's tensor ranks share parameters, as seen by this rank."""
    return Sharing(engine.share.splits, engine.grid.tensor, engine.grid.tensor_rank)


def split_of(entry: Mapping[str, Any]) -> Split | None:
    """How tensor ranks share a parameter of `units`. Raises as `Split.from_json`."""
    return Split.from_json(entry["split"]) if "split" in entry else None


def rows_of(entry: Mapping[str, Any]) -> range:
    """The rows of a parameter of `units` that its unit has: all of them, unless it has a block of a table."""
    first, count = entry.get("rows") or (0, _rows(entry))
    return range(first, first + count)


def local_shape(entry: Mapping[str, Any], tensor: int) -> tuple[int, ...]:
    """The shape of what each of `tensor` ranks has of a parameter of `units`, in one of them."""
    split = split_of(entry)
    if "rows" in entry:
        return (entry["rows"][1], *entry["shape"][1:])
    return tuple(entry["shape"]) if split is None else split.local_shape(entry["shape"], tensor)


def describe_units(engine: ZeroEngine) -> list[dict[str, Any]]:
    """The offsets, whole shapes and splits of each unit's parameters, and the elements of its shards."""
    splits, tensor = engine.share.splits, engine.grid.tensor
    return [
        describe_unit(
            dict(zip(unit.names, unit.parameters, strict=True)), unit.layout, splits, tensor, unit.block
        )
        for unit in engine.units
    ]


def describe_unit(
    parameters: Mapping[str, Tensor],
    layout: FlatLayout,
    splits: Mapping[str, Split] = MappingProxyType({}),
    tensor: int = 1,
    block: RowBlock | None = None,
) -> dict[str, Any]:
    """The same of one unit; `parameters` are a tensor rank's, in the order of its flat buffer.

    `block`: which rows of a table the only parameter is.
    """
    described: dict[str, dict[str, Any]] = {}
    for (name, parameter), offset in zip(parameters.items(), layout.offsets, strict=False):
        split = splits.get(name)
        if block is not None:
            shape, rows = block.whole_shape(parameter.shape), [block.first, len(parameter)]
            described[name] = {"shape": list(shape), "offset": offset, "rows": rows}
            continue
        if split is None or tensor == 1:
            described[name] = {"shape": list(parameter.shape), "offset": offset}
            continue
        whole = split.whole_shape(parameter.shape, tensor)
        described[name] = {"shape": list(whole), "offset": offset, "split": split.to_json()}
    return {"shard_numel": layout.shard_numel, "parameters": described}
