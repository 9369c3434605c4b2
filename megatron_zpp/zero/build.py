"""Makes the units of a model: lays out its parameters, allocates the buffers, fills in initial weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.traffic import TrafficLedger
from megatron_zpp.exchange.rooms import Buffer
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import ALIGNMENT, SHARD_MULTIPLE, Layout, Placement, Split, within
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.communication_plan import plan_communication
from megatron_zpp.zero.read_guard import ReadGuard
from megatron_zpp.zero.reads import (
    NamedUnits,
    Parameters,
    distinct,
    inside,
    module_of,
    parts_of,
    reads_of,
)
from megatron_zpp.zero.sharded_unit import Encoded, Residuals, Unit
from megatron_zpp.zero.tensor_parallel import TensorShare
from megatron_zpp.zero.weight_codes import GatherSources, WeightEncoder
from megatron_zpp.zero.weight_plan import WeightPlan

Initialize = Callable[[str, Tensor], None]


class UnitBuilder:
    """Makes the units of a model, whose own parameters they replace."""

    def __init__(
        self,
        communication: Communication,
        device: torch.device,
        config: EngineConfig,
        sources: GatherSources,
        codes: WeightEncoder | None,
    ) -> None:
        """`codes`: what encodes the weights that are held as codes, where some are."""
        self._communication, self._plan = communication, communication.plan
        self._device, self._sources, self._codes = device, sources, codes
        self._offload = config.zero.zero_offload_optimizer
        # Trained master weights are the gather sources and a byte beside each weight.
        self._splits = config.optimizer.splits_weights

    def build(self, modules: NamedUnits, initialize: Initialize) -> list[Unit]:
        """The units of modules in forward order. `initialize(name, tensor)` fills one whole fp32 parameter.

        The modules' parameters become views of the units' slots; the engine encodes those that are held as
        codes. A rank never holds more of the model than its shards, the slots and the one parameter that is
        being initialised.
        """
        plan = self._plan

        def drawn(placement: Placement) -> Tensor:
            """Initial values of a whole parameter, fp32."""
            whole = torch.empty(placement.shape, dtype=torch.float32, device=self._device)
            fill(initialize, placement.name, whole)
            return whole

        slots: dict[int, Tensor] = {}
        for slot, weights in zip(plan.slots, plan.weights, strict=True):
            if slot not in slots and weights.fill:
                slots[slot] = self._communication.memory(weights.fill, weights.slot, at=-1)
            elif slot not in slots:
                slots[slot] = torch.zeros(weights.slot.numel, dtype=weights.slot.dtype, device=self._device)
        units: list[Unit] = []
        parts = [parts_of(module) for _, module in modules]
        for (name, first), places, slot, weights in zip(
            distinct(modules), plan.reads.places, plan.slots, plan.weights, strict=True
        ):
            others = [parts[place][plan.reads.units[place].index(len(units))] for place in places[1:]]
            guard = ReadGuard(name or "the model", sum(len(unit.guard) for unit in units))
            unit = self._unit(first, others, weights, slots[slot], guard)
            # This rank's part of each parameter that it owns a part of.
            master = torch.zeros(len(unit.owned), device=self._device) if unit.is_split else unit.master
            unit.fill(master, unit.owned, drawn)
            if unit.is_split:
                unit.weights.replace(master)
            del master  # of a split unit it is temporary
            self._sources.replace(unit)
            units.append(unit)
        self._make_empty_parameters(modules)
        return units

    def _make_empty_parameters(self, modules: NamedUnits) -> None:
        """Make parameters that are in no unit, because nothing beside them has elements."""
        here = self._device.type, self._plan.made
        for module in (module_of(parameters) for _, parameters in modules):
            for path, parameter in module.named_parameters():
                if not parameter.numel() and (parameter.device.type, parameter.dtype) != here:
                    owner, _, leaf = path.rpartition(".")
                    made = torch.empty(parameter.shape, dtype=self._plan.made, device=self._device)
                    setattr(module.get_submodule(owner), leaf, nn.Parameter(made, parameter.requires_grad))

    def _unit(
        self,
        module: Parameters,
        others: Sequence[Parameters],
        weights: WeightPlan,
        full: Tensor,
        guard: ReadGuard,
    ) -> Unit:
        layout, memory = weights.layout, self._communication.memory
        owned, here, kept = weights.owned, weights.kept_elements, None
        if weights.bring and weights.kept_in_slot:
            kept = full[here.start : here.stop]
        elif weights.bring:
            kept = memory(weights.fill, weights.kept)
        if not weights.sends_from_target:
            gather_source = memory(weights.first, weights.gather_source)
        else:
            gather_source = full[owned.start : owned.stop] if kept is None else kept[within(owned, here)]
        if self._offload:
            master = torch.zeros(len(owned), pin_memory=self._device.type == "cuda")
        elif gather_source.dtype == torch.float32:
            master = gather_source
        elif self._splits and not layout.frozen:
            master = torch.zeros(len(owned), dtype=torch.uint8, device=self._device)
        else:
            master = torch.zeros(len(owned), device=self._device)
        parameters = self._replace_parameters(module, layout, full, guard)
        for other in others:
            _put_parameters(other, layout, parameters, guard)
        differs, encoded = weights.differences is not None, None
        if layout.coded:
            encoded = Encoded(owned, master, gather_source)
        if layout.coded and differs and kept is not None:  # each rank encodes its part of the reference
            codes = full[here.start : here.stop]
            if weights.in_turn:
                codes = memory(weights.fill, Buffer(len(here), torch.uint8))
            encoded = Encoded(here, kept, codes)
        residuals = [torch.zeros(size, dtype=kind, device=self._device) for size, kind in weights.residuals]
        return Unit(
            parameters=parameters,
            guard=guard,
            layout=layout,
            plan=weights,
            full=full,
            master=master,
            gather_source=gather_source,
            kept=kept,
            message=memory(weights.bring, weights.message) if differs else None,
            encoded=encoded,
            residuals=Residuals(*residuals) if residuals else None,
            gaps=layout.gaps_in(here),
        )

    def _replace_parameters(
        self, module: Parameters, layout: Layout, full: Tensor, guard: ReadGuard
    ) -> tuple[nn.Parameter, ...]:
        """Make the module's parameters views of a slot.

        Those that are held as codes get parameters of NaN without memory, to which autograd gives gradients,
        since a parameter's gradient has its format. The model multiplies the codes.
        """
        made, dtype = [], self._plan.made
        wide = full[layout.wide.start :].view(dtype) if layout.coded else full
        for placement, offset in zip(layout.placements, layout.offsets, strict=True):
            elements, shape = range(offset, offset + placement.numel), placement.local_shape
            # .data has its own version counter: filling the slot again must not count as a change
            if placement.coded:
                assert self._codes is not None
                self._codes.attach(placement.name, full[offset : elements.stop].view(shape).data)
                view = torch.full((), torch.nan, dtype=dtype, device=full.device).expand(shape)
            else:
                view = wide[within(elements, layout.wide)].view(shape)
            made.append(nn.Parameter(view.data, requires_grad=not layout.frozen))
        _put_parameters(module, layout, made, guard)
        return tuple(made)


def _put_parameters(
    module: Parameters, layout: Layout, parameters: Sequence[nn.Parameter], guard: ReadGuard
) -> None:
    """Give the module these parameters in place of its own ones, wherever it has them."""
    paths: dict[int, list[str]] = {}
    for path, own in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(own), []).append(path)
    for (_, own), placement, parameter in zip(in_order(module), layout.placements, parameters, strict=True):
        for path in paths[id(own)]:
            owner_path, _, leaf = path.rpartition(".")
            owner = module.get_submodule(owner_path)
            guard.put(owner, leaf, parameter, placement.name)
            if isinstance(owner, nn.RNNBase):  # cuDNN's layout would move the weights out of their slot
                owner.__dict__["flatten_parameters"] = _leave_in_slot


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


def build_communication(
    modules: NamedUnits,
    config: EngineConfig,
    mesh: Mesh,
    device: torch.device,
    ledger: TrafficLedger,
    *,
    recomputed: Sequence[range],
    share: TensorShare,
    coded: Collection[str],
    decoupled: Collection[str],
    rate_factors: Mapping[str, float],
    matrices: Mapping[str, tuple[int, ...]],
    inside_nodes: Collection[str],
    operations: Operations,
    timeout: timedelta | None,
    say: Callable[[str], None],
) -> Communication:
    """What the weights and gradients of modules in forward order travel through; every rank must call it.

    `share`: how tensor ranks share the model; `coded` to `matrices` as in `layouts_of`.
    """
    units, copy_engines = distinct(modules), False
    if device.type == "cuda":  # CPUs have none
        from megatron_zpp.distributed.copy_engine_trial import choose_copy_engines

        copy_engines = choose_copy_engines(mesh, device, timeout, say)
    block = max(config.zero.largest_block, share.block)
    layouts = layouts_of(units, mesh, block, share.splits, coded, decoupled, rate_factors, matrices)
    plan = plan_communication(
        config.zero,
        mesh,
        layouts,
        compute_dtype=getattr(torch, config.precision.compute_dtype(device.type)),
        reduce_in_bf16=config.precision.grad_reduce_in_bf16,
        copy_engines=copy_engines,
        reads=reads_of(modules, recomputed),
        inside_nodes=[at for at, (name, _) in enumerate(units) if name in inside_nodes],
    )

    def stream(ranks: Sequence[int]) -> CommStream:
        return CommStream(ranks, mesh, device, ledger, timeout, copy_engines=plan.copy_engines)

    return Communication(plan, stream, operations)


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
    `splits`: how tensor ranks share parameters; modules have one rank's parts. `coded`: the parameters that
    are held as codes, first in their units. `decoupled`: those with the second learning rate.
    `rate_factors`: of learning rate and epsilon, where they are not 1. `matrices`: those that Muon trains,
    and the rows of each matrix in them.
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
        layouts.append(
            Layout(
                placements=tuple(placements),
                axes=mesh.shards,
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
