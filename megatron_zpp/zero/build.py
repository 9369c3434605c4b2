"""Takes over a model's parameters: lays them out, makes the buffers, fills in the initial weights."""

from collections import Counter
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor, nn

from megatron_zpp.zero.collectives import Lane
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.topology import Topology
from megatron_zpp.zero.unit import GradientSlot, ParameterSlot, Residency, Unit

Initialize = Callable[[str, Tensor], None]


class UnitBuilder:
    """Makes the units of a model whose parameters are on the meta device.

    Units of equal layout share slots in turn: at stage 3 `prefetch` + 1 for their parameters, and at every
    stage two for the reduction of their gradients. All of these are made here.
    """

    def __init__(
        self,
        residency: Residency,
        topology: Topology,
        device: torch.device,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        prefetch: int,
        gathering: Lane,
        reducing: Lane,
        offload_optimizer: bool,
    ) -> None:
        self._residency, self._topology, self._device = residency, topology, device
        self._dtype, self._reduce_dtype = dtype, reduce_dtype
        self._prefetch, self._offload = prefetch, offload_optimizer
        self._gathering, self._reducing = gathering, reducing

    def build(self, modules: list[tuple[str, nn.Module]], initialize: Initialize) -> list[Unit]:
        """One unit a module, in order. `initialize(name, tensor)` fills one whole fp32 parameter.

        The modules' parameters become views of the units' slots. A rank never holds more of the model than
        its shards, the slots and the one parameter that is being initialised.
        """
        layouts = [self._layout(module) for _, module in modules]
        slots = {layout: self._slots(layout, count) for layout, count in Counter(layouts).items()}
        units = []
        for (name, module), layout in zip(modules, layouts, strict=True):
            parameter_slots, gradient_slots = slots[layout]
            names = tuple(f"{name}.{path}" for path, _ in _in_order(module))
            unit = self._unit(names, module, layout, next(parameter_slots), next(gradient_slots))
            for index, parameter in enumerate(unit.parameters):
                if any(piece.parameter == index for piece in layout.pieces(unit.owned)):
                    initial = torch.empty(parameter.shape, dtype=torch.float32, device=self._device)
                    initialize(names[index], initial)
                    unit.load(unit.master, index, initial)
            unit.publish()
            units.append(unit)
        return units

    def _layout(self, module: nn.Module) -> FlatLayout:
        parameters = [parameter for _, parameter in _in_order(module)]
        numels = tuple(parameter.numel() for parameter in parameters)
        return FlatLayout(numels, sum(map(_decays, parameters)), self._topology.world_size)

    def _slots(self, layout: FlatLayout, units: int) -> tuple[cycle, cycle]:
        """The parameter slots and the gradient slots of so many units, to be taken in turn."""
        stage, sent = self._residency, self._reduce_dtype
        count = min(self._prefetch + 1, units) if stage.parameters_sharded else units
        parameter_slots = [
            ParameterSlot(self._gathering.zeros(layout.numel, self._dtype)) for _ in range(count)
        ]
        sends = stage.optimizer_sharded or sent != torch.float32
        receives = stage.optimizer_sharded and layout.ranks > 1
        gradient_slots = [
            GradientSlot(
                self._reducing.zeros(layout.numel if sends else 0, sent),
                scratch=self._reducing.zeros(layout.numel if receives else 0, sent),
            )
            for _ in range(min(2, units))
        ]
        return cycle(parameter_slots), cycle(gradient_slots)

    def _unit(
        self,
        names: tuple[str, ...],
        module: nn.Module,
        layout: FlatLayout,
        slot: ParameterSlot,
        gradient_slot: GradientSlot,
    ) -> Unit:
        stage = self._residency
        owned = layout.shard(self._topology.rank) if stage.optimizer_sharded else range(layout.numel)
        if stage.parameters_sharded:
            published = self._gathering.zeros(len(owned), self._dtype)
        else:
            published = slot.buffer[owned.start : owned.stop]
        if self._offload:
            master = torch.zeros(len(owned), pin_memory=self._device.type == "cuda")
        elif self._dtype == torch.float32:
            master = published
        else:
            master = torch.zeros(len(owned), device=self._device)
        return Unit(
            names=names,
            parameters=_replace_parameters(module, layout, slot.buffer),
            layout=layout,
            owned=owned,
            slot=slot,
            gradient_slot=gradient_slot,
            master=master,
            published=published,
        )


def _decays(parameter: nn.Parameter) -> bool:
    """Matrices have weight decay; biases and norms have none."""
    return parameter.dim() >= 2


def _in_order(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's parameters as they lie in its flat buffer: those with weight decay first."""
    return sorted(module.named_parameters(), key=lambda named: not _decays(named[1]))


def _replace_parameters(module: nn.Module, layout: FlatLayout, buffer: Tensor) -> tuple[nn.Parameter, ...]:
    """Makes the module's parameters views of `buffer`."""
    views = []
    for (path, parameter), offset in zip(_in_order(module), layout.offsets, strict=False):
        view = buffer[offset : offset + parameter.numel()].view(parameter.shape)
        owner, _, leaf = path.rpartition(".")
        # .data has a version counter of its own: that the slot is filled again is no change of the parameter
        views.append(nn.Parameter(view.data))
        setattr(module.get_submodule(owner), leaf, views[-1])
    return tuple(views)
