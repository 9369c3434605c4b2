"""Makes the units of a model: lays out its parameters, allocates the buffers, fills in initial weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.exchange.rooms import Buffer
from megatron_zpp.exchange.route import Route
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import ALIGNMENT, SHARD_MULTIPLE, Layout, Placement, Split, within
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.read_guard import ReadGuard
from megatron_zpp.zero.reads import NamedUnits, Parameters, distinct, inside, module_of, parts_of
from megatron_zpp.zero.sharded_unit import Encoded, Residuals, Unit
from megatron_zpp.zero.unit_plan import UnitPlan
from megatron_zpp.zero.weight_codes import WeightEncoder

Initialize = Callable[[str, Tensor], None]


def build_units(
    modules: NamedUnits,
    communication: Communication,
    config: EngineConfig,
    device: torch.device,
    codes: WeightEncoder | None,
    initialize: Initialize,
) -> list[Unit]:
    """The units of modules in forward order. `initialize(name, tensor)` fills one whole fp32 parameter.

    The modules' parameters become views of the units' slots. What the first gathers send, and the codes of
    those that `codes` encodes, is yet to be written. A rank never holds more of the model than its shards,
    the slots and the one parameter that is being initialised.
    """
    plan = communication.plan

    def drawn(placement: Placement) -> Tensor:
        """Initial values of a whole parameter, fp32."""
        whole = torch.empty(placement.shape, dtype=torch.float32, device=device)
        fill(initialize, placement.name, whole)
        return whole

    slots: dict[int, Tensor] = {}
    for slot, weights in zip(plan.slots, plan.units, strict=True):
        if slot not in slots and weights.fill:
            slots[slot] = communication.memory(weights.fill, weights.slot, at=-1)
        elif slot not in slots:
            slots[slot] = torch.zeros(weights.slot.numel, dtype=weights.slot.dtype, device=device)
    units: list[Unit] = []
    parts = [parts_of(module) for _, module in modules]
    for (name, _), places, slot, weights in zip(
        distinct(modules), plan.reads.places, plan.slots, plan.units, strict=True
    ):
        guard = ReadGuard(name or "the model", sum(len(unit.guard) for unit in units))
        parameters = _parameters(weights.layout, slots[slot], plan.made, codes)
        for place in places:
            module = parts[place][plan.reads.units[place].index(len(units))]
            _put_parameters(module, weights.layout, parameters, guard)
        unit = _unit(len(units), weights, slots[slot], parameters, guard, communication.memory, config)
        # This rank's part of each parameter that it owns a part of.
        master = torch.zeros(len(unit.owned), device=device) if unit.is_split else unit.master
        unit.fill(master, unit.owned, drawn)
        if unit.is_split:
            unit.weights.replace(master)
        del master  # of a split unit it is temporary
        units.append(unit)
    for module in (module_of(parameters) for _, parameters in modules):
        _make_empty_parameters(module, plan.made, device)
    return units


def _make_empty_parameters(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Make parameters that are in no unit, because nothing beside them has elements."""
    for path, parameter in module.named_parameters():
        if not parameter.numel() and (parameter.device.type, parameter.dtype) != (device.type, dtype):
            owner, _, leaf = path.rpartition(".")
            made = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(made, parameter.requires_grad))


def _unit(
    number: int,
    weights: UnitPlan,
    full: Tensor,
    parameters: tuple[nn.Parameter, ...],
    guard: ReadGuard,
    memory: Callable[[Route, Buffer], Tensor],
    config: EngineConfig,
) -> Unit:
    layout, device, owned, here = weights.layout, full.device, weights.owned, weights.kept_elements
    own = {name: memory(*needed) for name, needed in weights.memory.items()}
    part = full[here.start : here.stop]
    kept = own.get("kept", part) if weights.bring else None
    sent = full[owned.start : owned.stop] if kept is None else kept[within(owned, here)]
    gather_source = own.get("gather_source", sent)
    if config.zero.zero_offload_optimizer:
        master = torch.zeros(len(owned), pin_memory=device.type == "cuda")
    elif gather_source.dtype == torch.float32:
        master = gather_source
    else:  # trained master weights may be the gather source and a byte beside each weight
        splits = config.optimizer.splits_weights and not layout.frozen
        master = torch.zeros(len(owned), dtype=torch.uint8 if splits else torch.float32, device=device)
    encoded = Encoded(owned, master, gather_source) if layout.coded else None
    if layout.coded and weights.differences is not None:  # each rank encodes its part of the reference
        encoded = Encoded(here, own["kept"], own.get("codes", part))
    residuals = [torch.zeros(size, dtype=kind, device=device) for size, kind in weights.residuals]
    return Unit(
        number=number,
        parameters=parameters,
        guard=guard,
        layout=layout,
        plan=weights,
        full=full,
        master=master,
        gather_source=gather_source,
        kept=kept,
        message=own.get("message"),
        encoded=encoded,
        residuals=Residuals(*residuals) if residuals else None,
        gaps=layout.gaps_in(here),
    )


def _parameters(
    layout: Layout, full: Tensor, dtype: torch.dtype, codes: WeightEncoder | None
) -> tuple[nn.Parameter, ...]:
    """Parameters that are views of a slot.

    Those that are held as codes are NaN without memory, to which autograd gives gradients, since a
    parameter's gradient has its format. The model multiplies the codes.
    """
    made = []
    wide = full[layout.wide.start :].view(dtype) if layout.coded else full
    for placement, offset in zip(layout.placements, layout.offsets, strict=True):
        elements, shape = range(offset, offset + placement.numel), placement.local_shape
        # .data has its own version counter: filling the slot again must not count as a change
        if placement.coded:
            assert codes is not None
            codes.attach(placement.name, full[offset : elements.stop].view(shape).data)
            view = torch.full((), torch.nan, dtype=dtype, device=full.device).expand(shape)
        else:
            view = wide[within(elements, layout.wide)].view(shape)
        made.append(nn.Parameter(view.data, requires_grad=not layout.frozen))
    return tuple(made)


def _put_parameters(
    module: Parameters, layout: Layout, parameters: Sequence[nn.Parameter], guard: ReadGuard
) -> None:
    """Give the module these parameters in place of its own ones, wherever it has them."""
    paths: dict[int, list[str]] = {}
    for path, own in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(own), []).append(path)
    for (_, own), placement, parameter in zip(in_order(module), layout.placements, parameters, strict=True):
        if own is parameter:
            continue  # of a module that is listed twice
        vars(parameter).update(vars(own))  # what the model has noted on it
        if own.requires_grad:
            own.register_post_accumulate_grad_hook(partial(_refuse_gradient, placement.name))
        for path in paths[id(own)]:
            owner_path, _, leaf = path.rpartition(".")
            owner = module_of(module).get_submodule(owner_path)
            guard.put(owner, leaf, parameter, placement.name)
            if isinstance(owner, nn.RNNBase):  # cuDNN's layout would move the weights out of their slot
                owner.__dict__["flatten_parameters"] = _leave_in_slot


def _refuse_gradient(name: str, replaced: nn.Parameter) -> None:
    """Raise RuntimeError, because the forward has read the parameter `replaced`, which nothing trains."""
    raise RuntimeError(
        f"{name}: is read from outside of its module, by code that has kept it since before the engine was "
        "built, which trains another one in its place; let that code ask the module for it in each forward"
    )


def _leave_in_slot() -> None:
    """In place of RNNBase.flatten_parameters, which the first forward on new parameters calls."""


def fill(initialize: Initialize, name: str, tensor: Tensor) -> None:
    """Let `initialize` fill a tensor. Raises ValueError unless it fills all of it."""
    floats = tensor.is_floating_point()
    tensor.fill_(torch.nan if floats else 0)
    version = tensor._version
    initialize(name, tensor)
    if tensor.numel() and (tensor.min().isnan().item() if floats else tensor._version == version):
        raise ValueError(f"{name}: initialize({name!r}, tensor) must fill the whole tensor, in place")


def layouts_of(
    modules: Sequence[tuple[str, Parameters]],
    mesh: Mesh,
    block: int = 1,
    splits: Mapping[str, Split] = MappingProxyType({}),
    coded: Collection[str] = (),
    decoupled: Collection[str] = (),
    rate_factors: Mapping[str, float] = MappingProxyType({}),
    matrices: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> list[Layout]:
    """The layout of each module's parameters in its unit's flat buffer.

    `block`: elements of the largest quantisation block of the run; no two parameters share a block.
    `splits`: how ranks share parameters; modules have one rank's parts. `coded`: the parameters that
    are held as codes, first in their units. `decoupled`: those with the second learning rate.
    `rate_factors`: of learning rate and epsilon, where they are not 1. `matrices`: those that Muon trains,
    and the rows of each matrix in them.

    A unit is cut over the shard axes along which its parameters are not split. Raises ValueError if its
    parameters differ in that, or Muon trains some.
    """
    layouts = []
    for unit, module in modules:
        placements = []
        for path, parameter in in_order(module):
            name, shape = inside(unit, path), tuple(parameter.shape)
            split = splits.get(name)
            if split is not None:
                shape = split.whole_shape(shape)
            placements.append(
                Placement(
                    name=name,
                    shape=shape,
                    split=split,
                    decays=_decays(parameter),
                    decoupled=name in decoupled,
                    rate_factor=rate_factors.get(name, 1.0),
                    coded=name in coded,
                    matrices=matrices.get(name, ()),
                )
            )
        held = [placement.coded for placement in placements]
        assert held == sorted(held, reverse=True), f"{unit}: parameters that are held as codes come first"
        axes = [each.shards(mesh) for each in placements] or [mesh.shards]
        for each, its in zip(placements, axes, strict=False):
            if its != axes[0]:
                fix = "units() must list them as units of their own"
                raise ValueError(f"{each.name}: is split among other ranks than {placements[0].name}; {fix}")
            if each.matrices and its != mesh.shards:
                fix = "is split among data ranks; omit it, and AdamW trains it"
                raise option_error("matrices", each.name, fix)
        layouts.append(
            Layout(
                placements=tuple(placements),
                axes=axes[0],
                alignment=max(SHARD_MULTIPLE if any(held) else ALIGNMENT, block),
                frozen=not any(parameter.requires_grad for parameter in module.parameters()),
            )
        )
    return layouts


def _decays(parameter: nn.Parameter) -> bool:
    """Whether a parameter has weight decay: matrices have, biases and norms do not."""
    return parameter.dim() >= 2


def in_order(module: Parameters) -> list[tuple[str, nn.Parameter]]:
    """A unit's parameters in the order of its flat buffer: those with weight decay first."""
    return sorted(module.named_parameters(), key=lambda named: not _decays(named[1]))
