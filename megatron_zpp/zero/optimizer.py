"""AdamW on fp32 master weights (Decoupled Weight Decay Regularization, algorithm 2), a unit at a time."""

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.interface import Gather
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.grad_segments import GradSegment
from megatron_zpp.zero.sharded_unit import Unit

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(Protocol):
    """Changes the master weights of all units. `moments` are buffers like `master`, by unit and name."""

    moments: list[dict[str, Tensor]]
    steps: Tensor  # taken so far: the t of the bias correction
    accepts_16bit_gradients: bool  # whether gradients may be in a 16-bit format

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """One step on gradients / `divisor`; none where `found_inf` is 1. All three scalars.

        Yields every unit in order, as soon as its new weights are submitted to be written where they are
        published, so that the first gathers run beside the steps of the other units.
        """


class Update(Protocol):
    """How one unit's states change; all tensors on one device, `gather_source` None where it is `master`."""

    accepts_16bit_gradients: bool

    def progress(self, steps: Tensor) -> Tensor:
        """What `steps` (), the one to come included, mean to every unit: computed once a step."""

    def __call__(
        self,
        states: tuple[Tensor, Tensor, Tensor, Tensor],
        gather_source: Tensor | None,
        *,
        progress: Tensor,
        divisor: Tensor,
        found_inf: Tensor,
        learning_rate: float,
        decayed: int,
    ) -> None:
        """`states`: master, gradient, first and second moment; the first `decayed` elements decay."""


class FusedAdamW:
    """Steps where the gradients are. Nothing here waits for the device."""

    def __init__(self, update: Update, units: list[Unit]) -> None:
        self._update, self._units, self.accepts_16bit_gradients = (
            update,
            units,
            update.accepts_16bit_gradients,
        )
        self.moments = [_zero_moments(unit) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """See AdamW.step."""
        self.steps += 1 - found_inf
        progress = self._update.progress(self.steps)
        for unit, moments in zip(self._units, self.moments, strict=True):
            decayed = unit.layout.decayed_in(unit.owned)
            for part in unit.gradients:
                exp_avg, exp_avg_sq = (part.of(moment) for moment in moments.values())
                self._update(
                    (part.of(unit.master), part.flat, exp_avg, exp_avg_sq),
                    self._gather_source_segment(unit, part),
                    progress=progress,
                    divisor=divisor,
                    found_inf=found_inf,
                    learning_rate=learning_rate,
                    decayed=min(max(decayed - part.start, 0), len(part.flat)),
                )
            yield unit

    def _gather_source_segment(self, unit: Unit, part: GradSegment) -> Tensor | None:
        if unit.gathers_from_master:
            return None
        return (
            part.of(unit.gather_source) if self.accepts_16bit_gradients else unit.gather_source
        )  # which may be a message


class OffloadedAdamW:
    """Steps on the CPU, where master weights and moments are.

    Gradients come over and new weights go back on a stream of their own, so that both run beside the steps of
    the other units. It waits for the device: for the clipping factor, and for each unit's gradients.
    """

    accepts_16bit_gradients = False

    def __init__(self, update: Update, units: list[Unit]) -> None:
        self._update, self._units = update, units
        self.moments = [_zero_moments(unit) for unit in units]
        self.steps = torch.zeros(())
        self._stream = torch.cuda.Stream(units[0].gather_source.device)
        self._gradients = [_pinned_like(unit.master) for unit in units]
        self._gather_sources = [
            None if _is_fp32(unit) else _pinned_like(unit.gather_source) for unit in units
        ]

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """See AdamW.step."""
        arrived = [self._bring(unit.gradient, gradients) for unit, gradients in self._pairs(self._gradients)]
        divisor, found_inf = divisor.cpu(), found_inf.cpu()
        if found_inf.item():  # what is published stays, and so does the rest
            yield from self._units
            return
        self.steps += 1
        progress = self._update.progress(self.steps)
        for index, unit in enumerate(self._units):
            arrived[index].synchronize()
            self._update(
                (unit.master, self._gradients[index], *self.moments[index].values()),
                self._gather_sources[index],
                progress=progress,
                divisor=divisor,
                found_inf=found_inf,
                learning_rate=learning_rate,
                decayed=unit.layout.decayed_in(unit.owned),
            )
            new = unit.master if self._gather_sources[index] is None else self._gather_sources[index]
            torch.cuda.current_stream().wait_event(self._bring(new, unit.gather_source))
            yield unit

    def _pairs(self, tensors: list[Tensor]) -> Iterator[tuple[Unit, Tensor]]:
        return zip(self._units, tensors, strict=True)

    def _bring(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """Copies between the memories, behind what the present stream has to do first."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class ApexAdamW:
    """NVIDIA apex's FusedAdam. It decides on the host, so each step waits for the device."""

    accepts_16bit_gradients = False

    def __init__(self, config: OptimizerConfig, units: list[Unit], gather: Gather) -> None:
        from apex.optimizers import FusedAdam

        self._units, self._gather = units, gather
        self.moments = [_zero_moments(unit) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)
        ]
        # Unit, part of its segments, that part's weights.
        self._weights: list[tuple[Unit, int, Tensor]] = []
        states = {}
        for unit, moments in zip(units, self.moments, strict=True):
            for part, group in enumerate(groups):
                weight = unit.segments(unit.master)[part].detach()
                if len(weight):
                    self._weights.append((unit, part, weight))
                    group["params"].append(weight)
                    states[weight] = {name: unit.segments(moments[name])[part] for name in MOMENTS}
        betas = (config.adam_beta1, config.adam_beta2)
        self._adam = FusedAdam(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=config.adam_eps
        )
        self._adam.state.update(states)

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> Iterator[Unit]:
        """See AdamW.step."""
        if not found_inf.item():
            self._step(learning_rate, divisor)
        for unit in self._units:
            self._gather.write_gather_source(unit.master, unit.gather_source)
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
            weight.grad = None  # the unit's to keep or to free


class KernelUpdate:
    """The project's kernel: one pass over the states, which also writes the weights as they are published."""

    def __init__(
        self, config: OptimizerConfig, operations: Operations, format: QuantFormat | None = None
    ) -> None:
        """`format` is that of the published messages; None: weights in the compute format."""
        self._config, self._operations, self._format = config, operations, format
        self.accepts_16bit_gradients = format is None

    def progress(self, steps: Tensor) -> Tensor:
        """The bias corrections (2,)."""
        powers = [beta ** steps.double() for beta in (self._config.adam_beta1, self._config.adam_beta2)]
        return (1 - torch.stack(powers)).float()

    def __call__(
        self,
        states: tuple[Tensor, Tensor, Tensor, Tensor],
        gather_source: Tensor | None,
        *,
        progress: Tensor,
        divisor: Tensor,
        found_inf: Tensor,
        learning_rate: float,
        decayed: int,
    ) -> None:
        """See Update."""
        config = self._config
        settings = {
            "divisor": divisor,
            "found_inf": found_inf,
            "bias_corrections": progress,
            "learning_rate": learning_rate,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "eps": config.adam_eps,
            "weight_decay": config.weight_decay,
            "decayed": decayed,
        }
        if self._format is None:
            self._operations.adamw(*states, gather_source, **settings)
        else:
            self._operations.adamw_quantize(*states, gather_source, self._format, **settings)


class TorchUpdate:
    """torch's fused kernel, and a cast."""

    accepts_16bit_gradients = False

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def progress(self, steps: Tensor) -> Tensor:
        """The steps themselves."""
        return steps

    def __call__(
        self,
        states: tuple[Tensor, Tensor, Tensor, Tensor],
        gather_source: Tensor | None,
        *,
        progress: Tensor,
        divisor: Tensor,
        found_inf: Tensor,
        learning_rate: float,
        decayed: int,
    ) -> None:
        """See Update."""
        for part, weight_decay in ((slice(decayed), self._config.weight_decay), (slice(decayed, None), 0.0)):
            parts = [[state[part]] for state in states]
            if len(parts[0][0]):
                torch._fused_adamw_(
                    *parts,
                    [],
                    [progress],
                    lr=learning_rate,
                    beta1=self._config.adam_beta1,
                    beta2=self._config.adam_beta2,
                    weight_decay=weight_decay,
                    eps=self._config.adam_eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                    found_inf=found_inf,
                )
        if gather_source is not None:
            gather_source.copy_(states[0])


def build_adamw(
    config: OptimizerConfig,
    units: list[Unit],
    communication: Communication,
    backend: Literal["apex", "torch"],
    operations: Operations | None,
) -> AdamW:
    """AdamW of the fused backend; torch's own kernel serves where there are no `operations`."""
    if backend == "apex":
        return ApexAdamW(config, units, communication.gather)
    if operations is None:
        update = TorchUpdate(config)
    else:
        update = KernelUpdate(config, operations, communication.weight_format)
    offloaded = units[0].master.device != units[0].gather_source.device
    return OffloadedAdamW(update, units) if offloaded else FusedAdamW(update, units)


def _zero_moments(unit: Unit) -> dict[str, Tensor]:
    return {name: torch.zeros_like(unit.master) for name in MOMENTS}


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _is_fp32(unit: Unit) -> bool:
    return unit.gather_source.dtype == torch.float32
