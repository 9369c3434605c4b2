"""Optimizers on fp32 master weights, one unit at a time: AdamW (1711.05101, algorithm 2) so far.

An `Optimizer` steps all units of a rank. DeviceOptimizer and OffloadedOptimizer do that with any elementwise
`UpdateRule`; an optimizer that looks at more than one element, as Muon does at matrices, is an Optimizer.
"""

from collections.abc import Collection, Iterator
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.grad_segments import GradSegment, segments_inside
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.weight_codes import GatherSources

MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")  # the states of AdamW, as checkpoints name them
Scalars = TypeVar("Scalars")
Rates = tuple[float, float]


class Optimizer(Protocol):
    """Changes the master weights of all units of this rank.

    A checkpoint saves `steps` and, beside the master weights of each unit, its `states`.
    """

    state_names: tuple[str, ...]
    states: list[dict[str, Tensor]]  # by unit and name; each fp32 and as large as the unit's `master`
    steps: Tensor  # (); steps taken so far, skipped ones not included
    accepts_16bit_gradients: bool

    def step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """Take one step on gradients / `divisor` (), or none if `found_inf` () is 1.

        `rates` are the learning rates of all parameters but the decoupled ones, and of these.
        Yields the units in order, each as soon as the writing of its gather source has been submitted, so
        that the first gathers overlap with the steps of the other units.
        """


class ShardSegment(NamedTuple):
    """The elements of this rank's shard of a unit that one call of an update rule changes, on one device."""

    master: Tensor  # (n,) fp32
    states: tuple[Tensor, ...]  # each (n,) fp32, in the order of `UpdateRule.state_names`
    gather_source: Tensor | None  # also receives the new weights: (n,), or a message; None if it is `master`
    decayed: int  # the first `decayed` elements have weight decay


class UpdateRule(Protocol[Scalars]):
    """The arithmetic of an elementwise optimizer, on any part of a unit."""

    state_names: tuple[str, ...]
    accepts_16bit_gradients: bool

    def scalars(self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> Scalars:
        """What all units of a step share, computed once per step; `steps` () includes the one to come."""

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: Scalars) -> None:
        """Change the master weights and states of `shard`, unless `found_inf` is 1; `gradient` is (n,)."""


class DeviceOptimizer(Generic[Scalars]):
    """Steps on the device of the gradients, and never waits for it."""

    def __init__(
        self,
        rule: UpdateRule[Scalars],
        units: list[Unit],
        sources: GatherSources | None = None,
        decoupled: Collection[str] = (),
    ) -> None:
        """`decoupled` names parameters with the second learning rate.

        Their units, and those with weights that are held as codes, need `sources`.
        """
        self._rule, self._units, self._sources = rule, units, sources
        self._runs = [_runs_of(unit, decoupled) for unit in units]
        self.state_names, self.accepts_16bit_gradients = rule.state_names, rule.accepts_16bit_gradients
        self.states = [_zero_states(unit, rule.state_names) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)

    def step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """See Optimizer.step."""
        self.steps += 1 - found_inf
        scalars = self._rule.scalars(self.steps, rates[0], divisor, found_inf)
        for unit, states, runs in zip(self._units, self.states, self._runs, strict=True):
            if runs:
                self._step_runs(unit, states, runs, rates, divisor, found_inf)
                yield unit
                continue
            decayed = unit.layout.decayed_in(unit.owned)
            for segment in unit.gradients:
                shard = ShardSegment(
                    segment.of(unit.master),
                    tuple(segment.of(state) for state in states.values()),
                    self._gather_source_segment(unit, segment),
                    min(max(decayed - segment.start, 0), len(segment.flat)),
                )
                self._rule.step(shard, segment.flat, scalars)
            if unit.layout.coded:
                self._write(unit)
            yield unit

    def _step_runs(
        self,
        unit: Unit,
        states: dict[str, Tensor],
        runs: list["_Run"],
        rates: Rates,
        divisor: Tensor,
        found_inf: Tensor,
    ) -> None:
        """Step a unit whose parameters have two learning rates, then write its gather source as a whole."""
        decayed = unit.layout.decayed_in(unit.owned)
        for run in runs:
            scalars = self._rule.scalars(self.steps, rates[run.decoupled], divisor, found_inf)
            for segment in segments_inside(unit.gradients, run.elements):
                part = GradSegment(run.elements.start + segment.start, segment.flat)
                shard = ShardSegment(
                    part.of(unit.master),
                    tuple(part.of(state) for state in states.values()),
                    None,
                    min(max(decayed - part.start, 0), len(part.flat)),
                )
                self._rule.step(shard, part.flat, scalars)
        if not unit.gathers_from_master:
            self._write(unit)

    def _write(self, unit: Unit) -> None:
        assert self._sources is not None, "units with two learning rates or codes need it"
        self._sources.write(unit)

    def _gather_source_segment(self, unit: Unit, segment: GradSegment) -> Tensor | None:
        if unit.gathers_from_master or unit.layout.coded:
            return None
        # Without 16-bit gradients there is one segment, and the source may be a message, which cannot be cut.
        return segment.of(unit.gather_source) if self.accepts_16bit_gradients else unit.gather_source


class OffloadedOptimizer(Generic[Scalars]):
    """Steps on the CPU, which holds the master weights and the states.

    Gradients and new weights are copied on a separate stream, so that both copies overlap with the steps of
    other units. The host waits for the device: for the divisor, then for the gradients of each unit.
    """

    accepts_16bit_gradients = False

    def __init__(self, rule: UpdateRule[Scalars], units: list[Unit]) -> None:
        self._rule, self._units = rule, units
        self.state_names = rule.state_names
        self.states = [_zero_states(unit, rule.state_names) for unit in units]
        self.steps = torch.zeros(())
        self._stream = torch.cuda.Stream(units[0].gather_source.device)
        self._gradients = [_pinned_like(unit.master) for unit in units]
        self._gather_sources = [
            None if _is_fp32(unit) else _pinned_like(unit.gather_source) for unit in units
        ]

    def step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """See Optimizer.step."""
        arrived = [
            self._copy(unit.gradient, gradient)
            for unit, gradient in zip(self._units, self._gradients, strict=True)
        ]
        divisor, found_inf = divisor.cpu(), found_inf.cpu()
        if found_inf.item():
            yield from self._units
            return
        self.steps += 1
        scalars = self._rule.scalars(self.steps, rates[0], divisor, found_inf)
        for index, unit in enumerate(self._units):
            arrived[index].synchronize()
            states, gather_source = tuple(self.states[index].values()), self._gather_sources[index]
            shard = ShardSegment(unit.master, states, gather_source, unit.layout.decayed_in(unit.owned))
            self._rule.step(shard, self._gradients[index], scalars)
            new = unit.master if gather_source is None else gather_source
            torch.cuda.current_stream().wait_event(self._copy(new, unit.gather_source))
            yield unit

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """Copy between the CPU and the device, after all work submitted to the current stream so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class ApexAdamW:
    """NVIDIA apex's FusedAdam. The host reads `found_inf` and `steps`, so each step waits for the device."""

    state_names = MOMENTS
    accepts_16bit_gradients = False

    def __init__(self, config: OptimizerConfig, units: list[Unit], sources: GatherSources) -> None:
        from apex.optimizers import FusedAdam

        self._units, self._sources = units, sources
        self.states = [_zero_states(unit, MOMENTS) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)
        ]
        # Unit, index into its segments (with and without weight decay), weights of that segment.
        self._weights: list[tuple[Unit, int, Tensor]] = []
        adam_states = {}
        for unit, moments in zip(units, self.states, strict=True):
            for part, group in enumerate(groups):
                weight = unit.segments(unit.master)[part].detach()
                if len(weight):
                    self._weights.append((unit, part, weight))
                    group["params"].append(weight)
                    adam_states[weight] = {name: unit.segments(moments[name])[part] for name in MOMENTS}
        betas = (config.adam_beta1, config.adam_beta2)
        self._adam = FusedAdam(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=config.adam_eps
        )
        self._adam.state.update(adam_states)

    def step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """See Optimizer.step."""
        if not found_inf.item():
            self._step(rates[0], divisor)
        for unit in self._units:
            self._sources.write(unit)
            yield unit

    def _step(self, learning_rate: float, divisor: Tensor) -> None:
        for unit, part, weight in self._weights:
            weight.grad = unit.segments(unit.gradient)[part]
        for group in self._adam.param_groups:
            group["lr"], group["step"] = learning_rate, int(self.steps.item())
            torch._foreach_div_([weight.grad for weight in group["params"]], divisor)
        self._adam.step()
        self.steps += 1
        for _, _, weight in self._weights:
            weight.grad = None  # only the unit decides when the gradient is freed


class KernelAdamW:
    """AdamW by the project's kernel: one pass over memory, which also writes the gather source."""

    state_names = MOMENTS

    def __init__(
        self, config: OptimizerConfig, operations: Operations, quant_format: QuantFormat | None = None
    ) -> None:
        """`quant_format` is that of the messages to gather from; None: weights in the compute dtype."""
        self._config, self._operations, self._quant_format = config, operations, quant_format
        self.accepts_16bit_gradients = quant_format is None

    def scalars(
        self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor
    ) -> AdamWScalars:
        """See UpdateRule."""
        config = self._config
        powers = [beta ** steps.double() for beta in (config.adam_beta1, config.adam_beta2)]
        return AdamWScalars(
            divisor=divisor,
            found_inf=found_inf,
            bias_corrections=(1 - torch.stack(powers)).float(),
            learning_rate=learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: AdamWScalars) -> None:
        """See UpdateRule."""
        master, (exp_avg, exp_avg_sq), gather_source, decayed = shard
        states = master, gradient, exp_avg, exp_avg_sq
        if self._quant_format is None or gather_source is None:
            self._operations.adamw(*states, gather_source, scalars, decayed=decayed)
            return
        self._operations.adamw_quantize(*states, gather_source, self._quant_format, scalars, decayed=decayed)


class TorchAdamWScalars(NamedTuple):
    """The scalars of torch's fused kernel."""

    steps: Tensor
    learning_rate: float
    divisor: Tensor
    found_inf: Tensor


class TorchAdamW:
    """AdamW by torch's fused kernel, and a cast."""

    state_names = MOMENTS
    accepts_16bit_gradients = False

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def scalars(
        self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor
    ) -> TorchAdamWScalars:
        """See UpdateRule."""
        return TorchAdamWScalars(steps, learning_rate, divisor, found_inf)

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: TorchAdamWScalars) -> None:
        """See UpdateRule."""
        config, tensors = self._config, (shard.master, gradient, *shard.states)
        with_decay, without = slice(shard.decayed), slice(shard.decayed, None)
        for elements, weight_decay in ((with_decay, config.weight_decay), (without, 0.0)):
            masters, gradients, averages, squares = ([tensor[elements]] for tensor in tensors)
            if len(masters[0]):
                torch._fused_adamw_(
                    masters,
                    gradients,
                    averages,
                    squares,
                    [],
                    [scalars.steps],
                    lr=scalars.learning_rate,
                    beta1=config.adam_beta1,
                    beta2=config.adam_beta2,
                    weight_decay=weight_decay,
                    eps=config.adam_eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=scalars.divisor,
                    found_inf=scalars.found_inf,
                )
        if shard.gather_source is not None:
            shard.gather_source.copy_(shard.master)


def build_optimizer(
    config: OptimizerConfig,
    units: list[Unit],
    communication: Communication,
    backend: Literal["apex", "torch"],
    operations: Operations | None,
    sources: GatherSources,
    decoupled: Collection[str] = (),
) -> Optimizer:
    """AdamW of the fused backend; without `operations`, by torch's own kernel.

    Raises ValueError for `decoupled` parameters where the optimizer has one learning rate.
    """
    offloaded = units[0].master.device != units[0].gather_source.device
    if decoupled and (backend == "apex" or offloaded):
        fix = "needs --fused-backend torch and no --zero-offload-optimizer"
        raise option_error("--decoupled-lr", "(given)", fix)
    if backend == "apex":
        return ApexAdamW(config, units, sources)
    rule: UpdateRule = (
        TorchAdamW(config)
        if operations is None
        else KernelAdamW(config, operations, communication.weight_format)
    )
    if offloaded:
        return OffloadedOptimizer(rule, units)
    return DeviceOptimizer(rule, units, sources, decoupled)


class _Run(NamedTuple):
    """Elements of this rank's shard of a unit that have the same learning rate, the second if `decoupled`."""

    elements: range
    decoupled: bool


def _runs_of(unit: Unit, decoupled: Collection[str]) -> list[_Run]:
    """The runs of this rank's shard; empty if no parameter of it is decoupled, as for most units."""
    starts: list[tuple[int, bool]] = []
    for piece in unit.layout.parameter_slices(unit.owned):
        second = unit.names[piece.parameter] in decoupled
        if not starts or starts[-1][1] != second:
            starts.append((piece.destination if starts else 0, second))
    if not any(second for _, second in starts):
        return []
    stops = [start for start, _ in starts[1:]] + [len(unit.owned)]
    return [_Run(range(start, stop), second) for (start, second), stop in zip(starts, stops, strict=True)]


def _zero_states(unit: Unit, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(unit.master) for name in names}


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _is_fp32(unit: Unit) -> bool:
    return unit.gather_source.dtype == torch.float32
