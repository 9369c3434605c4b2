"""Takes over a model's parameters: lays them out, makes the buffers, fills in the initial weights."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.flat_layout import ALIGNMENT, FlatLayout
from megatron_zpp.zero.unit import InFlight, ParameterSlot, Residency, Unit

Initialize = Callable[[str, Tensor], None]


class UnitBuilder:
    """Makes the units of a model whose parameters are on the meta device.

    Units of equal layout share slots in turn: at stage 3 `prefetch` + 1 for their parameters, and at every
    stage two for the reduction of their gradients, so that as many can be under way.
    """

    def __init__(
        self,
        residency: Residency,
        topology: Topology,
        device: torch.device,
        communication: Communication,
        *,
        dtype: torch.dtype,
        prefetch: int,
        offload_optimizer: bool,
        error_feedback: bool,
    ) -> None:
        self._residency, self._topology, self._device = residency, topology, device
        self._communication, self._dtype = communication, dtype
        self._prefetch, self._offload, self._error_feedback = prefetch, offload_optimizer, error_feedback

    def build(
        self, modules: list[tuple[str, nn.Module]], layouts: list[FlatLayout], initialize: Initialize
    ) -> list[Unit]:
        """One unit a module, in order. `initialize(name, tensor)` fills one whole fp32 parameter.

        The modules' parameters become views of the units' slots. A rank never holds more of the model than
        its shards, the slots and the one parameter that is being initialised.
        """
        slots = {layout: self._slots(layout, count) for layout, count in Counter(layouts).items()}
        units = []
        for (name, module), layout in zip(modules, layouts, strict=True):
            unit = self._unit(name, module, layout, slots[layout])
            for index, parameter in enumerate(unit.parameters):
                if any(piece.parameter == index for piece in layout.pieces(unit.owned)):
                    initial = torch.empty(parameter.shape, dtype=torch.float32, device=self._device)
                    initialize(unit.names[index], initial)
                    unit.load(unit.master, index, initial)
            self._communication.gather.write_gather_source(unit.master, unit.gather_source)
            unit.changed()
            units.append(unit)
        return units

    def _slots(self, layout: FlatLayout, units: int) -> "_Slots":
        count = min(self._prefetch + 1, units) if self._residency.parameters_sharded else units
        comm_stream = self._communication.filling
        parameters = [
            ParameterSlot(buffer=comm_stream.zeros(layout.numel, self._dtype)) for _ in range(count)
        ]
        reducing = [InFlight(), InFlight()]
        return _Slots(cycle(parameters), cycle(reducing), shared=count < units)

    def _unit(self, name: str, module: nn.Module, layout: FlatLayout, slots: "_Slots") -> Unit:
        stage, communication = self._residency, self._communication
        owned = layout.shard(self._topology.rank) if stage.optimizer_sharded else range(layout.numel)
        slot = next(slots.parameters)
        if stage.parameters_sharded or communication.weight_format is not None:
            gather_source = communication.gather.gather_source(layout.shard_numel)
        else:
            gather_source = slot.buffer[owned.start : owned.stop]
        if self._offload:
            master = torch.zeros(len(owned), pin_memory=self._device.type == "cuda")
        elif gather_source.dtype == torch.float32:
            master = gather_source
        else:
            master = torch.zeros(len(owned), device=self._device)
        error = self._error(layout)
        return Unit(
            names=tuple(f"{name}.{path}" for path, _ in in_order(module)),
            parameters=_replace_parameters(module, layout, slot.buffer),
            layout=layout,
            owned=owned,
            slot=slot,
            reducing=next(slots.reducing),
            master=master,
            gather_source=gather_source,
            secondary=self._secondary(layout) if slots.shared else None,
            error=error,
            error_before=None if error is None else torch.empty_like(error),
        )

    def _secondary(self, layout: FlatLayout) -> Tensor | None:
        secondary = self._communication.secondary
        return None if secondary is None else secondary.new(layout)

    def _error(self, layout: FlatLayout) -> Tensor | None:
        if not self._error_feedback:
            return None
        numel = self._communication.reduction.error_numel(layout)
        return torch.zeros(numel, dtype=torch.bfloat16, device=self._device)


@dataclass(frozen=True)
class _Slots:
    """The slots that units of one layout take in turn; `shared`: whether two of them use one."""

    parameters: Iterator[ParameterSlot]
    reducing: Iterator[InFlight]
    shared: bool


def layouts_of(
    modules: Sequence[tuple[str, nn.Module]], ranks: int, multiple: int, block: int = 1
) -> list[FlatLayout]:
    """How the parameters of each module lie in its unit's flat buffer; `multiple` as in FlatLayout.

    `block`: elements of the largest quantisation block of the run, which no two parameters share.
    """
    layouts = []
    for _, module in modules:
        parameters = [parameter for _, parameter in in_order(module)]
        numels = tuple(parameter.numel() for parameter in parameters)
        decayed = sum(map(_decays, parameters))
        layouts.append(FlatLayout(numels, decayed, ranks, multiple, max(ALIGNMENT, block)))
    return layouts


def _decays(parameter: nn.Parameter) -> bool:
    """Matrices have weight decay; biases and norms have none."""
    return parameter.dim() >= 2


def in_order(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's parameters as they lie in its flat buffer: those with weight decay first."""
    return sorted(module.named_parameters(), key=lambda named: not _decays(named[1]))


def _replace_parameters(module: nn.Module, layout: FlatLayout, buffer: Tensor) -> tuple[nn.Parameter, ...]:
    """Makes the module's parameters views of `buffer`."""
    views = []
    for (path, parameter), offset in zip(in_order(module), layout.offsets, strict=False):
        view = buffer[offset : offset + parameter.numel()].view(parameter.shape)
        owner, _, leaf = path.rpartition(".")
        # .data has a version counter of its own: that the slot is filled again is no change of the parameter
        views.append(nn.Parameter(view.data))
        setattr(module.get_submodule(owner), leaf, views[-1])
    return tuple(views)
