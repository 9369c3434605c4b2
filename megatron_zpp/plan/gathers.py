"""Which weights a step gathers, pass by pass: the engine's own `Gathers`, walked through a step on paper.

So the slots that still hold a unit, what is gathered ahead and what recomputation asks for are what a run
does, for any stage, prefetch and recomputation.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.model.gpt import recomputed_units, segments
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.gathers import Gathers, Phase
from megatron_zpp.zero.unit import InFlight, ParameterSlot, Unit

_WALKED = 3  # micro-batches: the first, one like all between, the last


@dataclass
class Gathered:
    """How many times one pass gathers a unit of each layout."""

    world: Counter[FlatLayout] = field(default_factory=Counter)  # over all ranks
    secondary: Counter[FlatLayout] = field(default_factory=Counter)  # inside hpZ groups


@dataclass(frozen=True)
class Walked:
    """A forward or a backward, with the recomputation in it, that a step repeats `times` times."""

    forward: bool
    micro_batch: int  # from 0; the last one walked stands for a step's last
    times: int
    gathered: Gathered


class _Counted:
    """A Gather that only takes note."""

    def __init__(self, layouts: Iterable[FlatLayout]) -> None:
        self.units: Counter[FlatLayout] = Counter()
        self._layouts = {layout.numel: layout for layout in layouts}  # those of equal size travel alike

    def gather(self, full: Tensor, gather_source: Tensor, keep: Tensor | None = None) -> Pending:
        """See zero.collectives.Gather."""
        self.units[self._layouts[full.numel()]] += 1
        return Pending()


def walk(job: Job) -> list[Walked]:
    """The passes of a step in the midst of a run. What its optimizer gathers ahead is its first forward's."""
    walked = min(job.micro_batches, _WALKED)
    order = [(forward, index) for index in range(walked) for forward in (True, False)]
    if job.zero.zero_stage == 0 or job.ranks == 1:
        gathered = [Gathered() for _ in order]
    else:
        units = _units(job)
        world, secondary = _Counted(job.layouts), _Counted(job.layouts)
        plan = job.communication
        gathers = Gathers(
            units,
            world,
            secondary if plan.secondary else None,
            plan.prefetch,
            recomputed=recomputed_units(job.model.num_layers, job.recompute),
        )
        for _ in range(2):  # the second step finds what the first one left
            gathered = []
            gathers.write_gather_source(units)
            for forward, _index in order:
                _visit(gathers, job, forward)
                gathered.append(Gathered(world.units, secondary.units))
                world.units, secondary.units = Counter(), Counter()
    between = job.micro_batches - walked + 1
    return [
        Walked(forward, index, between if walked == _WALKED and index == 1 else 1, sizes)
        for (forward, index), sizes in zip(order, gathered, strict=True)
    ]


def _visit(gathers: Gathers, job: Job, forward: bool) -> None:
    """Calls what the hooks of zero/hooks.py call in one pass."""
    head = job.model.num_layers + 1
    if forward:
        gathers.begin(Phase.FORWARD)
        for index in range(head + 1):
            gathers.before_forward(index)
        return
    gathers.begin(Phase.BACKWARD)
    gathers.before_backward(head)
    for first, stop, recomputed in reversed(list(segments(job.model.num_layers, job.recompute))):
        for index in reversed(range(first, stop)):
            gathers.before_backward(1 + index)
            if recomputed and index == stop - 1:
                for again in range(first, stop):
                    gathers.before_forward(1 + again)
    gathers.before_backward(0)


def _units(job: Job) -> list[Unit]:
    """Units like those of UnitBuilder, without memory."""
    plan, slots, units = job.communication, {}, []
    for index, layout in zip(plan.slots, plan.layouts, strict=True):
        if index not in slots:
            slots[index] = ParameterSlot(buffer=_meta(layout.numel))
        unit = Unit(
            names=(),
            parameters=(),
            layout=layout,
            owned=layout.shard(0),
            slot=slots[index],
            reducing=InFlight(),
            master=_meta(0),
            gather_source=_meta(0),
            secondary=None if plan.secondary_part(layout) is None else _meta(0),
        )
        units.append(unit)
    return units


def _meta(numel: int) -> Tensor:
    return torch.empty(numel, device="meta")
