"""What state.json says of units and their parameters; see states.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.checkpoint.slices import Sharing
from megatron_zpp.distributed.split import RowBlock, Split
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.flat_layout import FlatLayout


def row_count(entry: Mapping[str, Any]) -> int:
    """Rows of the whole parameter; 1 of a scalar."""
    return entry["shape"][0] if entry["shape"] else 1


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
    first, count = entry.get("rows") or (0, row_count(entry))
    return range(first, first + count)


def local_shape(entry: Mapping[str, Any], tensor: int) -> tuple[int, ...]:
    """The shape of what each of `tensor` ranks has of a parameter of `units`, in one of them."""
    split = split_of(entry)
    if "rows" in entry:
        return (entry["rows"][1], *entry["shape"][1:])
    return tuple(entry["shape"]) if split is None else split.local_shape(entry["shape"], tensor)


def describe_buffers(engine: ZeroEngine) -> dict[str, dict[str, Any]]:
    """The shape and dtype of each persistent buffer."""
    return {
        name: {"shape": list(buffer.shape), "dtype": DTYPES[buffer.dtype]}
        for name, buffer in engine.buffers.persistent().items()
    }


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
    unit = {"shard_numel": layout.shard_numel, "parameters": described}
    return unit | {"frozen": True} if layout.frozen else unit
