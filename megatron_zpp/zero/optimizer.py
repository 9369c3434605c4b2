"""Optimizers on fp32 master weights, one unit at a time; zero/adamw.py has the arithmetic of AdamW.

An `Optimizer` steps all units of a rank. DeviceOptimizer and OffloadedOptimizer do that with any elementwise
`UpdateRule`; an optimizer that looks at more than one element, as Muon does at matrices, is an Optimizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import copy_beside
from megatron_zpp.exchange.segments import GradSegment, segments_inside
from megatron_zpp.placement import Piece, overlap
from megatron_zpp.zero.held_states import HeldStates
from megatron_zpp.zero.sharded_unit import Unit

Scalars = TypeVar("Scalars")
Rates = tuple[float, float]


class Optimizer(ABC):
    """Changes the master weights of all units of this rank.

    A checkpoint saves `steps` and, beside the master weights of each unit, its `states`: by name, of this
    rank's part of `elements`.
    """

    state_names: tuple[str, ...]
    states: list[dict[str, HeldStates]]
    steps: Tensor  # (); steps taken so far, skipped ones not included
    accepts_16bit_gradients = False
    row_moments: Mapping[str, Sequence[Tensor]] = MappingProxyType({})  # by parameter: NorMuon's, in parts

    def elements(self, unit: Unit, name: str) -> range:
        """The elements of a unit's buffer that have the state `name` on some rank; by default all."""
        return range(unit.layout.numel)

    @abstractmethod
    def begin_step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        """Begin a step on gradients / `divisor` (), in which nothing changes if `found_inf` () is 1.

        `rates` are the learning rates of all parameters but the decoupled ones, and of these, before
        factors.
        """

    @abstractmethod
    def update(self, index: int) -> None:
        """Change unit `index`, and submit the writing of its gather source, which can be sent from then on.

        Units are updated in order, each once per step.
        """


class ShardSegment(NamedTuple):
    """The elements of this rank's shard of a unit that one call of an update rule changes, on one device."""

    master: Tensor  # (n,) fp32, or the bytes of split weights
    states: tuple[Tensor, ...]  # each (n,) fp32, in the order of `UpdateRule.state_names`, or in another form
    gather_source: Tensor | None  # also receives the new weights: (n,), or a message; None if nothing does
    decayed: int  # the first `decayed` elements have weight decay
    scales: tuple[Tensor | None, ...]  # of the states in forms that have some: (n / 128,)
    unit: int  # which trained unit of the model it is a part of
    first: int  # the number of its first element in the unit


class UpdateRule(Protocol[Scalars]):
    """The arithmetic of an elementwise optimizer, on any part of a unit.

    A rule that `writes_gather_source` also writes the new weights to `ShardSegment.gather_source`, in one
    pass over memory. Otherwise the segment has none, and the engine writes what is gathered.
    """

    state_names: tuple[str, ...]
    accepts_16bit_gradients: bool
    writes_gather_source: bool

    def scalars(self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> Scalars:
        """What all units of a step share; `steps` () includes the one to come.

        Computed once per step, or for each unit where units step in the backward.
        """

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: Scalars) -> None:
        """Change the master weights and states of `shard`, unless `found_inf` is 1; `gradient` is (n,).

        The gradient is the one of the loss times `divisor`.
        """


RuleOf: TypeAlias = Callable[[float], UpdateRule[Scalars]]
Write: TypeAlias = Callable[[Unit, Tensor | None], None]  # `Weights.write`


class DeviceOptimizer(Optimizer, Generic[Scalars]):
    """Steps by an elementwise rule on the device of the gradients, and never waits for it."""

    def __init__(
        self,
        rule_of: RuleOf[Scalars],
        units: list[Unit],
        write: Write,
        forms: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`rule_of` makes the rule of parameters with a factor of learning rate and epsilon.

        `forms`: by name, those of states that are not fp32.
        """
        self._units, self._write = units, write
        self._rule = rule = rule_of(1.0)
        self.state_names, self.accepts_16bit_gradients = rule.state_names, rule.accepts_16bit_gradients
        first = next(iter(rule.state_names), "")  # all have the same elements, or there are none
        self._changed = [overlap(unit.owned, self.elements(unit, first)) for unit in units]
        self._runs = [self._runs_of(*each) for each in zip(units, self._changed, strict=True)]
        groups = {group for runs in self._runs for _, group in runs}
        self._rules = {group: rule_of(group.factor) for group in groups}
        self.states = [
            zero_states(unit, rule.state_names, changed, forms)
            for unit, changed in zip(units, self._changed, strict=True)
        ]
        self.steps = torch.zeros((), device=units[0].master.device)
        self._scalars: dict[Group, Scalars] = {}  # of the present step; none if it is skipped
        self._allocate()

    def _allocate(self) -> None:
        """Allocate what a step needs beside the states."""

    def _group_of(self, piece: Piece) -> "Group | None":
        """None if the rule does not change the parameter."""
        return Group(piece.placement.decoupled, piece.placement.rate_factor)

    def _runs_of(self, unit: Unit, changed: range) -> list[tuple[range, "Group"]]:
        """The runs of one group in a part of this rank's shard; a gap belongs to the run before it."""
        pieces = groupby(unit.layout.pieces_in(changed), self._group_of)
        starts = [(group, next(of_group).at.start) for group, of_group in pieces]
        groups = [group for group, _ in starts] or [Group(decoupled=False, factor=1.0)]  # padding alone
        ends = pairwise([changed.start, *(start for _, start in starts[1:]), changed.stop])
        elements = (range(start - unit.owned.start, stop - unit.owned.start) for start, stop in ends)
        return [(run, group) for run, group in zip(elements, groups, strict=True) if group is not None]

    def begin_step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        self.steps += 1 - found_inf
        self.compute_scalars(rates, divisor, found_inf)

    def update(self, index: int) -> None:
        unit = self._units[index]
        of_master = unit.gather_source.data_ptr() == unit.master.data_ptr()  # what is gathered is the weights
        source = None if of_master or unit.layout.coded else unit.gather_source
        self._change(index, unit.grad.segments, source)
        if unit.layout.coded:
            self._write(unit, None)

    def compute_scalars(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        """Let the units that follow in a step have other arguments than `begin_step` got."""
        self._scalars = {
            group: rule.scalars(self.steps, rates[group.decoupled] * group.factor, divisor, found_inf)
            for group, rule in self._rules.items()
        }

    def _change(self, index: int, gradients: Sequence[GradSegment], source: Tensor | None) -> None:
        """Change the master weights and states of unit `index`; write what is gathered to `source`, if given.

        A message cannot be cut: unless one run is all of the shard, it is written when all have changed.
        """
        unit, runs = self._units[index], self._runs[index]
        is_message = source is not None and unit.plan.codes is not None
        cut = len(runs) > 1 or self._changed[index] != unit.owned
        by_rule = self._rule.writes_gather_source and not (is_message and cut)
        whole = source if by_rule else None
        before = self._changed[index].start - unit.owned.start  # elements of the shard without states
        for run, group in runs:
            for start, flat in segments_inside(gradients, run):
                part = GradSegment(run.start + start, flat)
                here = slice(part.start - before, part.start - before + len(flat))
                states = [self.states[index][name].part(here) for name in self._rule.state_names]
                shard = ShardSegment(
                    part.of(unit.master),
                    tuple(each.values for each in states),
                    whole if whole is None or is_message else part.of(whole),
                    min(max(unit.decayed - part.start, 0), len(flat)),
                    tuple(each.beside for each in states),
                    index,
                    unit.owned.start + part.start,
                )
                self._rules[group].step(shard, flat, self._scalars[group])
        if source is not None and whole is None:
            self._write(unit, source)


class OffloadedOptimizer(DeviceOptimizer[Scalars]):
    """Steps on the CPU, which holds the master weights and the states.

    Gradients and new weights are copied on a separate stream, so that both copies overlap with the steps of
    other units. The host waits for the device: for the divisor, then for the gradients of each unit.
    """

    def _allocate(self) -> None:
        self.accepts_16bit_gradients = False
        self._stream = torch.cuda.Stream(self._units[0].gather_source.device)
        self._gradients = [_pinned_like(unit.master) for unit in self._units]
        self._gather_sources = [
            None if _is_fp32(unit) or unit.layout.coded else _pinned_like(unit.gather_source)
            for unit in self._units
        ]
        self._arrived: list[torch.cuda.Event] = []  # the gradients of the present step

    def begin_step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        self._arrived = [
            copy_beside(self._stream, gradient, unit.gradient)
            for unit, gradient in zip(self._units, self._gradients, strict=True)
        ]
        divisor, found_inf = divisor.cpu(), found_inf.cpu()
        self._scalars = {}
        if not found_inf.item():
            self.steps += 1
            self.compute_scalars(rates, divisor, found_inf)

    def update(self, index: int) -> None:
        unit, source = self._units[index], self._gather_sources[index]
        if self._scalars:
            self._arrived[index].synchronize()
            self._change(index, [GradSegment(0, self._gradients[index])], source)
        if unit.layout.coded and not _is_fp32(unit):
            self._write(unit, None)  # also if the step is skipped, because scales may have changed
        elif self._scalars:
            new = unit.master if source is None else source
            torch.cuda.current_stream().wait_event(copy_beside(self._stream, unit.gather_source, new))


class Group(NamedTuple):
    """Parameters of one learning rate: the second if `decoupled`, times a factor, which epsilon has too."""

    decoupled: bool
    factor: float


def zero_states(
    unit: Unit,
    names: tuple[str, ...],
    elements: range | None = None,
    forms: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, HeldStates]:
    """States of a unit before the first step, by name: of the shard or some `elements`, in `forms`."""
    numel, device = len(unit.owned) if elements is None else len(elements), unit.master.device
    states = {
        name: HeldStates(name, torch.zeros(numel, device=device)) for name in names if name not in forms
    }
    if forms:
        from megatron_zpp.ops.state_codes import zeros

        states |= {name: HeldStates(name, *zeros(numel, form, device)) for name, form in forms.items()}
    return states


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _is_fp32(unit: Unit) -> bool:
    return unit.gather_source.dtype == torch.float32
