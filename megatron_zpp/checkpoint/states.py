"""The states of an engine and a run that a checkpoint contains.

docs/internals/checkpoints.md has the files, and where state.json says that a parameter lies: its mesh and
units. A rank of another run reads the slices of parameters that it owns from the shards that contain them. At
stage 0 every rank writes an equal part of the states, which all ranks have. Also in state.json, unless a run
or an older version has none of it:
    buffers  `shape` and `dtype`, as safetensors calls it, of each persistent buffer by name; rank 0's file
             has them as `buffer/NAME`
    units    `frozen` ones have no optimizer states. `states`: by kind, the first element of the unit and the
             one behind the last one that have it, if not all have
    kinds    states in the files for each unit: `engine.states.kinds`, or `weights` only; older versions had
             the weights and, if `with_optimizer`, AdamW's moments
    forms    the dtypes of kinds that are not fp32, which the files have as the ranks held them, with
             `KIND_scales/unit_3` or `weights_corrections/unit_3` beside (ops/state_codes.py)
    difference_formats   which units send weight differences in 8 bits next, and what decides on the step
             after: `raised` and `measured` by unit
    last_norm   with --optimizer-in-backward, the norm of the last step's gradient, by which the next step is
             clipped
    matrices the parameters that Muon trains. With NorMuon rank 0's file has `row_moments/NAME`, the moments
             of a parameter's rows
    product_scaling   by linear map, what the scales of 8-bit products follow from (model/fp8/scaling.py)
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import Layout, Placement, Split
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import WEIGHTS


def tensor_name(kind: str, unit: int) -> str:
    return f"{kind}/unit_{unit}"


def buffer_name(name: str) -> str:
    return f"buffer/{name}"


def row_moments_name(name: str) -> str:
    return f"row_moments/{name}"


def saved_mesh(state: dict[str, Any]) -> Mesh:
    """The mesh of the run that wrote state.json. Raises ValueError, or KeyError without `ranks`."""
    ranks = state["ranks"]
    nodes, context, tensor = sizes = [state.get(name, 1) for name in ("nodes", "context", "tensor")]
    if any(type(size) is not int or size < 1 for size in (ranks, *sizes)) or ranks % math.prod(sizes):
        raise ValueError(
            f"{ranks!r} ranks are not {nodes!r} nodes of {context!r} × groups of {tensor!r} ranks"
        )
    local = ranks // math.prod(sizes)
    return Mesh(nodes=nodes, local_ranks=local, context_ranks=context, tensor_ranks=tensor)


def shards_of(engine: ZeroEngine, *, with_optimizer: bool) -> dict[str, Tensor]:
    """This rank's shards by name: the engine's memory, which optimizer steps change; copies of few rows."""
    kinds = engine.states.kinds if with_optimizer else (WEIGHTS,)
    shards = {
        tensor_name(name, index): shard
        for kind in kinds
        for name, shards in engine.states.saved(kind).items()
        for index, shard in enumerate(shards)
        if len(shard)
    }
    if engine.topology.rank:
        return shards
    moments = engine.states.row_moments() if with_optimizer else {}
    shards |= {row_moments_name(name): rows for name, rows in moments.items()}
    return shards | {buffer_name(name): buffer for name, buffer in engine.buffers.persistent().items()}


def describe_state(
    engine: ZeroEngine,
    progress: Progress,
    *,
    with_optimizer: bool,
    config: dict[str, Any],
    tokenizer: dict[str, Any],
) -> dict[str, Any]:
    """The content of state.json; every rank must call it. Waits for the device."""
    kinds, mesh = engine.states.kinds if with_optimizer else (WEIGHTS,), engine.mesh
    state = {
        "progress": asdict(progress),
        "with_optimizer": with_optimizer,
        "optimizer_steps": engine.states.optimizer_steps,
        "loss_scale": engine.loss_scale.state(),
        "ranks": mesh.world_size,
        "nodes": mesh.nodes,
        "context": mesh.context_ranks,
        "tensor": mesh.tensor_ranks,
        "units": describe_units(engine),
        "buffers": describe_buffers(engine),
        "kinds": list(kinds),
        "difference_formats": engine.states.difference_formats() if with_optimizer else None,
        "product_scaling": engine.scaling.state() if with_optimizer and engine.scaling else None,
        "tokenizer": tokenizer,
        "config": config,
    }
    if engine.last_norm is not None:
        state["last_norm"] = engine.last_norm
    if with_optimizer and (matrices := engine.states.matrices()):
        state["matrices"] = matrices
    if forms := {kind: form for kind, form in engine.states.forms().items() if kind in kinds}:
        state["forms"] = forms
    return state


def formats_of_units(
    state: dict[str, Any] | None, saved: list[dict[str, Any]], present: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The `difference_formats` of `saved` units for the `present` units, which may be others.

    A unit takes after every saved unit that has one of its parameters, or rows of one.
    """
    if state is None:
        return None
    places: dict[str, list[int]] = {}
    for index, unit in enumerate(saved):
        for name in unit["parameters"]:
            places.setdefault(name, []).append(index)
    origins = [{index for name in unit["parameters"] for index in places[name]} for unit in present]
    return {
        "raised": [any(state["raised"][unit] for unit in units) for units in origins],
        "measured": [
            [sum(squares) for squares in zip(*(state["measured"][unit] for unit in units), strict=True)]
            for units in origins
        ],
    }


def placement_of(name: str, entry: Mapping[str, Any], tensor: int) -> tuple[Placement, int]:
    """Where a parameter of `units` is, or a block of its rows, and which row of the parameter is its first.

    `tensor`: tensor ranks, which have the parts unless the split names others. Raises ValueError, KeyError or
    TypeError for other values.
    """
    split, first_row = None, 0
    shape, runs = tuple(entry["shape"]), tuple(entry.get("split", {}).get("runs", ()))
    if "split" in entry:
        dim, dims = entry["split"]["dim"], 1 if "rows" in entry else len(shape)
        whole = type(dim) is int and 0 <= dim < dims and sum(runs) == shape[dim]
        if not whole or not all(type(run) is int and run > 0 for run in runs):
            raise ValueError(f"not a split of {name} {shape}: {entry['split']!r}")
        axis = Axis(*entry["split"].get("axis", (1, tensor)))
        if any(type(side) is not int or side < 1 for side in (axis.stride, axis.size)):
            raise ValueError(f"not the ranks of a split of {name}: {axis}")
        split = Split(dim, runs, axis)
    if "rows" in entry:  # whose `split` is that of the whole parameter, and each rank has a part of the block
        first_row, count = entry["rows"]
        shape, split = (count, *shape[1:]), split and replace(split, runs=(count,))
    return Placement(name=name, shape=shape, split=split), first_row


def describe_buffers(engine: ZeroEngine) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(buffer.shape), "dtype": DTYPES[buffer.dtype]}
        for name, buffer in engine.buffers.persistent().items()
    }


def describe_units(engine: ZeroEngine) -> list[dict[str, Any]]:
    """The offsets, whole shapes and splits of each unit's parameters, and the elements of its shards."""
    described = [describe_unit(unit.layout, engine.mesh) for unit in engine.units]
    for kind in engine.states.kinds:
        for unit, entry, elements in zip(engine.units, described, engine.states.elements(kind), strict=True):
            if not unit.frozen and elements != range(unit.layout.numel):
                entry.setdefault("states", {})[kind] = [elements.start, elements.stop]
    return described


def describe_unit(layout: Layout, mesh: Mesh) -> dict[str, Any]:
    described: dict[str, dict[str, Any]] = {}
    for placement, offset in zip(layout.placements, layout.offsets, strict=True):
        entry = described[placement.name] = {"shape": list(placement.shape), "offset": offset}
        if placement.split is not None:
            entry["split"] = {"dim": placement.split.dim, "runs": list(placement.split.runs)}
            if (axis := placement.split.axis) != mesh.tensor:
                entry["split"]["axis"] = [axis.stride, axis.size]
    unit = {"shard_numel": layout.shard_numel, "parameters": described}
    return unit | {"frozen": True} if layout.frozen else unit
