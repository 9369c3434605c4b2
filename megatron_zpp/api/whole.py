"""The states of an engine as whole tensors by the names of the model: what `state_dict` has and takes.

    model       weights in fp32, and buffers, by the names of the model's own `state_dict()`
    optimizer   `exp_avg` and `exp_avg_sq`, or the states of another optimizer, by name, each with a tensor in
                fp32 by parameter; with weight differences also `reference`, with NorMuon `row_moments`
    progress    `iteration`, `optimizer_steps`, `loss_scale`, `difference_formats`, `last_norm`, and the
                `matrices` that Muon trains: plain values

Every rank must call the functions here. Rank 0 has the states.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import Placement, overlap, within
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import MOMENTUM, REFERENCE, WEIGHTS, may_lack, owners_of, sources_of
from megatron_zpp.zero.reads import NamedUnits, distinct, inside

ROW_MOMENTS = "row_moments"
State = dict[str, Any]


class Name(NamedTuple):
    """What a name of a parameter in the model stands for."""

    own: str  # its name in its unit, where a tied parameter has one name
    shape: tuple[int, ...]
    path: str  # where the model has it, first


def names_of(model: nn.Module, units: NamedUnits) -> dict[str, Name]:
    """Each name of the model's parameters; their names in `units` where these call them otherwise."""
    own: dict[int, str] = {}
    for unit, part in distinct(units):
        for path, parameter in part.named_parameters():
            own.setdefault(id(parameter), inside(unit, path))
    named = list(model.named_parameters(remove_duplicate=False))
    places = {(name, id(parameter)) for name, parameter in named}
    found: dict[str, Name] = {}
    for name, parameter in named:
        mine = own.get(id(parameter), name)
        known = (mine, id(parameter)) in places
        found.setdefault(name if known else mine, Name(mine, tuple(parameter.shape), name))
    return found


def state_of(engine: ZeroEngine, names: Mapping[str, Name]) -> State:
    """The states, on rank 0 and on its CPU; an empty dictionary on the other ranks."""
    states = {kind: _gathered(engine, kind) for kind in engine.states.kinds}
    progress = {
        "iteration": engine.iteration,
        "optimizer_steps": engine.states.optimizer_steps,
        "loss_scale": engine.loss_scale.state(),
        "difference_formats": engine.states.difference_formats(),
        "last_norm": engine.last_norm,
        "matrices": engine.states.matrices(),
    }
    if engine.mesh.rank:
        return {}
    if moments := engine.states.row_moments():
        states[ROW_MOMENTS] = {name: rows.cpu() for name, rows in moments.items()}
    weights = states.pop(WEIGHTS)
    model: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, (own, shape, _) in names.items():
        weight = weights.get(own, torch.empty(shape))  # without elements it is in no unit
        model[name] = weight.clone() if own in used else weight  # safetensors refuses shared memory
        used.add(own)
    named = engine.buffers.persistent(every_name=True)
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in named.items()}
    return {"model": model | buffers, "optimizer": states, "progress": progress}


def load_state(
    engine: ZeroEngine, names: Mapping[str, Name], state: Mapping[str, Any], *, optimizer: bool
) -> None:
    """Load what `state_of` returned, of any mesh and stage. Only rank 0's `state` is read.

    Without `optimizer` weights and buffers alone. A parameter that was frozen begins with moments of zero.
    Raises the same ValueError on all ranks, which names what is missing, is not part of the model, or has
    another shape; nothing is loaded then.
    """
    first = engine.mesh.rank == 0
    problem = _problem(engine, names, state, optimizer=optimizer) if first else None
    rest = first and problem is None and optimizer
    told = [(problem, state["progress"], list(state["optimizer"])) if rest else (problem, {}, [])]
    if engine.mesh.world_size > 1:
        dist.broadcast_object_list(told, 0, device=engine.device)
    problem, progress, saved = told[0]
    if problem is not None:
        raise ValueError(problem)
    model = state["model"] if first else {}
    _load(engine, WEIGHTS, [{each.own: model[name] for name, each in names.items()}] if first else [])
    for name, buffer in engine.buffers.persistent().items():
        sent = model[name].to(buffer.dtype) if first else torch.empty_like(buffer)
        buffer.copy_(from_rank_0(sent, engine.mesh, engine.device))
    if not optimizer:
        return
    for kind in engine.states.kinds[1:]:
        sources = sources_of(kind, engine.states.kinds, saved)
        if sources or kind != REFERENCE:  # which otherwise begins as the weights
            _load(engine, kind, [state["optimizer"].get(each, {}) for each in sources] if first else [])
    moments = state["optimizer"].get(ROW_MOMENTS, {}) if first else {}

    def read(name: str, rows: Tensor) -> None:
        if name in moments:
            rows.copy_(moments[name])
        rows.copy_(from_rank_0(rows, engine.mesh, engine.device))

    engine.states.load_row_moments(read)
    formats = progress["difference_formats"] if REFERENCE in saved else None
    engine.states.load_difference_formats(formats)
    engine.states.load_optimizer_steps(progress["optimizer_steps"])
    engine.loss_scale.load_state(progress["loss_scale"])
    engine.load_last_norm(progress.get("last_norm"))
    engine.iteration = progress["iteration"]


def _gathered(engine: ZeroEngine, kind: str) -> dict[str, Tensor]:
    """One kind of states by the units' names, whole and on the CPU of rank 0; empty on other ranks."""
    mesh, found = engine.mesh, dict[str, Tensor]()
    shards_of, elements_of = engine.states.shards(kind), engine.states.shard_elements(kind)
    for unit, part, elements, every in zip(
        engine.units, shards_of, elements_of, engine.states.elements(kind), strict=True
    ):
        if not every:
            continue
        axes = unit.layout.axes
        owners = owners_of(kind, mesh, axes)
        numel = unit.layout.numel // len(owners)
        shards = [torch.zeros(numel, device=engine.device)]
        if mesh.rank in owners:
            first = owners.index(mesh.rank) * numel
            shards[0][within(elements, range(first, first + numel))] = part.to(engine.device)
        if mesh.world_size > 1:
            own, count = shards[0], mesh.world_size if mesh.rank == 0 else 0
            shards = [torch.empty_like(own) for _ in range(count)]
            dist.gather(own, shards or None)
        for rank in unit.layout.different_ranks if mesh.rank == 0 else ():
            flat = torch.cat([shards[owner] for owner in owners_of(kind, mesh.at(rank), axes)]).cpu()
            for placement, offset in zip(unit.layout.placements, unit.layout.offsets, strict=True):
                if not overlap(range(offset, offset + placement.numel), every):
                    continue
                whole = found.setdefault(placement.name, torch.empty(placement.shape))
                part = flat[offset : offset + placement.numel].view(placement.local_shape)
                for here, there in placement.parts(rank):
                    whole[there].copy_(part[here])
    return found


def _load(engine: ZeroEngine, kind: str, parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Load one kind of states, the sum of rank 0's whole tensors, or zero."""

    def whole(placement: Placement) -> Tensor:
        values = torch.zeros(placement.shape, device=engine.device)
        if given := [part[placement.name] for part in parts if placement.name in part]:
            values.copy_(sum(given[1:], given[0]))
        return from_rank_0(values, engine.mesh, engine.device)

    engine.states.load_whole(kind, whole)


def from_rank_0(values: Tensor, mesh: Mesh, device: torch.device) -> Tensor:
    """Those of rank 0, in any format, on the device; others give a tensor of the same shape and format."""
    values = values.to(device).contiguous()
    if mesh.world_size > 1:
        dist.broadcast(values.view(-1).view(torch.uint8), 0)
    return values


def _problem(
    engine: ZeroEngine, names: Mapping[str, Name], state: Mapping[str, Any], *, optimizer: bool
) -> str | None:
    """Why `state` is not one of the engine's model; None if it is."""
    for part in ("model", "optimizer", "progress") if optimizer else ("model",):
        if part not in state:
            fix = "" if part == "model" else "; optimizer=False loads weights and buffers alone"
            return f"state: has no {part!r}{fix}"
    shapes = {name: each.shape for name, each in names.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in engine.buffers.persistent().items()}
    known = shapes.keys() | engine.buffers.persistent(every_name=True).keys()
    for name in sorted((shapes.keys() - state["model"].keys()) | (state["model"].keys() - known)):
        return f"{name}: {'missing from the state' if name in shapes else 'not part of this model'}"
    for name, shape in shapes.items():
        if (saved := tuple(state["model"][name].shape)) != shape:
            return f"{name}: has shape {saved} in the state, {shape} in this model"
    if optimizer and MOMENTUM in state["optimizer"] and MOMENTUM not in engine.states.kinds:
        return f"{MOMENTUM}: the state is Muon's, and has no moments of matrices; optimizer=False leaves it"
    if optimizer and (problem := engine.states.left_by_muon(state["progress"].get("matrices", ()))):
        return problem
    for kind in engine.states.kinds[1:] if optimizer else ():
        if kind not in state["optimizer"] and not may_lack(kind):
            there = ", ".join(state["optimizer"]) or "nothing"
            return f"{kind}: missing from the state, whose optimizer has {there}"
    return None
