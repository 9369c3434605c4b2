"""What state.json says of units and their parameters; see states.py."""

from collections.abc import Mapping
from typing import Any

from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.mesh import Axis
from megatron_zpp.placement import Layout, Placement, Split
from megatron_zpp.zero.engine import ZeroEngine


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


def placement_of(name: str, entry: Mapping[str, Any], tensor: int) -> Placement:
    """Where a parameter of `units` is. Raises ValueError, KeyError or TypeError for other values."""
    split = None
    shape, runs = tuple(entry["shape"]), tuple(entry.get("split", {}).get("runs", ()))
    if "split" in entry:
        dim = entry["split"]["dim"]
        whole = type(dim) is int and 0 <= dim < len(shape) and sum(runs) == shape[dim]
        if not whole or not all(type(run) is int and run > 0 for run in runs):
            raise ValueError(f"not a split of {name} {shape}: {entry['split']!r}")
        split = Split(dim, runs, Axis(1, tensor))
    return Placement(name=name, shape=shape, split=split, rows=rows_of(entry) if "rows" in entry else None)


def rows_of(entry: Mapping[str, Any]) -> range:
    """The rows of a parameter of `units` that its unit has: all of them, unless it has a block of a table."""
    first, count = entry.get("rows") or (0, (*entry["shape"], 1)[0])
    return range(first, first + count)


def describe_buffers(engine: ZeroEngine) -> dict[str, dict[str, Any]]:
    """The shape and dtype of each persistent buffer."""
    return {
        name: {"shape": list(buffer.shape), "dtype": DTYPES[buffer.dtype]}
        for name, buffer in engine.buffers.persistent().items()
    }


def describe_units(engine: ZeroEngine) -> list[dict[str, Any]]:
    """The offsets, whole shapes and splits of each unit's parameters, and the elements of its shards."""
    described = [describe_unit(unit.layout) for unit in engine.units]
    for kind in engine.states.kinds:
        for unit, entry, elements in zip(engine.units, described, engine.states.elements(kind), strict=True):
            if not unit.frozen and elements != range(unit.layout.numel):
                entry.setdefault("states", {})[kind] = [elements.start, elements.stop]
    return described


def describe_unit(layout: Layout) -> dict[str, Any]:
    """The same of one unit."""
    described: dict[str, dict[str, Any]] = {}
    for placement, offset in zip(layout.placements, layout.offsets, strict=True):
        entry = described[placement.name] = {"shape": list(placement.shape), "offset": offset}
        if placement.rows is not None:
            entry["rows"] = [placement.rows.start, len(placement.rows)]
        if placement.split is not None:
            entry["split"] = {"dim": placement.split.dim, "runs": list(placement.split.runs)}
    unit = {"shard_numel": layout.shard_numel, "parameters": described}
    return unit | {"frozen": True} if layout.frozen else unit
