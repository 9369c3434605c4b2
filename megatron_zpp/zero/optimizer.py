"""AdamW on fp32 master weights (Decoupled Weight Decay Regularization, algorithm 2)."""

from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.zero.unit import Unit

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(Protocol):
    """Changes the master weights of all units. `moments` are buffers like `master`, by unit and name."""

    moments: list[dict[str, Tensor]]
    steps: Tensor  # taken so far: the t of the bias correction

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> None:
        """One step on gradients / `divisor`; none where `found_inf` is 1. All three scalars."""


class TorchAdamW:
    """torch's fused kernel, told on the device whether to step and by what to divide.

    Where the master weights are in CPU memory, so is everything here, and gradients are brought over first.
    """

    def __init__(self, config: OptimizerConfig, units: list[Unit]) -> None:
        self._config, self._units = config, units
        self.moments = [_zero_moments(unit) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)
        self._copies: list[Tensor] | None = None  # of the gradients, beside states in CPU memory
        if units[0].master.device != units[0].slot.buffer.device:
            self._copies = [torch.empty_like(unit.master, pin_memory=True) for unit in units]

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> None:
        """See AdamW.step. Waits for the device only where states are offloaded."""
        all_gradients = [unit.gradients for unit in self._units]
        if self._copies is not None:
            for copy, gradients in zip(self._copies, all_gradients, strict=True):
                copy.copy_(gradients, non_blocking=True)
            all_gradients = self._copies
            divisor, found_inf = divisor.cpu(), found_inf.cpu()  # which also waits for the gradients
        self.steps += 1 - found_inf
        for part, weight_decay in enumerate((self._config.weight_decay, 0.0)):
            parts = [
                [unit.segments(flat)[part] for flat in (unit.master, gradients, *moments.values())]
                for unit, gradients, moments in zip(self._units, all_gradients, self.moments, strict=True)
            ]
            parts = [segments for segments in parts if len(segments[0])]
            if not parts:
                continue
            weights, gradients, exp_avgs, exp_avg_sqs = map(list, zip(*parts, strict=True))
            torch._fused_adamw_(
                weights,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                [self.steps] * len(weights),
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


class ApexAdamW:
    """NVIDIA apex's FusedAdam. It decides on the host, so each step waits for the device."""

    def __init__(self, config: OptimizerConfig, units: list[Unit]) -> None:
        from apex.optimizers import FusedAdam

        self.moments = [_zero_moments(unit) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)
        groups = [{"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)]
        self._weights: list[
            tuple[Unit, int, Tensor]
        ] = []  # (unit, part of its segments, that part's weights)
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

    def step(self, learning_rate: float, divisor: Tensor, found_inf: Tensor) -> None:
        """See AdamW.step."""
        if found_inf.item():
            return
        for unit, part, weight in self._weights:
            weight.grad = unit.segments(unit.gradients)[part]
        for group in self._adam.param_groups:
            group["lr"], group["step"] = learning_rate, int(self.steps.item())
            torch._foreach_div_([weight.grad for weight in group["params"]], divisor)
        self._adam.step()
        self.steps += 1
        for _, _, weight in self._weights:
            weight.grad = None  # the unit's to keep or to free


def build_adamw(config: OptimizerConfig, units: list[Unit], backend: Literal["apex", "torch"]) -> AdamW:
    """AdamW of the fused backend."""
    return ApexAdamW(config, units) if backend == "apex" else TorchAdamW(config, units)


def _zero_moments(unit: Unit) -> dict[str, Tensor]:
    return {name: torch.zeros_like(unit.master) for name in MOMENTS}
