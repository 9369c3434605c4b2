"""Holds the model states of a run and turns micro-batches into optimizer steps."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.zero.loss_scale import LossScale
from megatron_zpp.zero.optimizer import build_adamw, clip_factor
from megatron_zpp.zero.process_group import mean_over_ranks
from megatron_zpp.zero.topology import Topology
from megatron_zpp.zero.unit import FlatUnit


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `grad_norm` is the global norm before clipping."""

    grad_norm: float
    skipped: bool
    loss_scale: float


class ZeroEngine:
    """Stage 0: every rank keeps all states; gradients are summed over ranks while backward runs.

    `model(tokens, targets)` returns a mean loss and `model.units()` its modules in forward order. The engine
    takes over the storage of the model's parameters: they become views of flat buffers on `device`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig,
        precision: PrecisionConfig,
        topology: Topology,
        device: torch.device,
        fused_backend: Literal["apex", "torch"] = "torch",
    ) -> None:
        self.model, self.topology, self.device = model.to(device), topology, device
        self.clip_grad = optimizer.clip_grad
        dtype = getattr(torch, precision.compute_dtype(device.type))
        self.units = [
            FlatUnit(
                [(f"{unit}.{name}", p) for name, p in module.named_parameters()], dtype, topology.world_size
            )
            for unit, module in model.units()
        ]
        self._master = {
            name: view
            for unit in self.units
            for name, view in zip(unit.names, unit.master_views(), strict=True)
        }
        for unit in self.units:
            for name, gradient in zip(unit.names, unit.gradient_views(), strict=True):
                self._master[name].grad = gradient
        self.loss_scale = LossScale.from_config(precision)
        self._adamw = build_adamw(optimizer, self._master, fused_backend)

    def accumulate(self, tokens: Tensor, *, micro_batches: int, last: bool) -> Tensor:
        """Adds the gradients of one of a step's `micro_batches`; returns its mean loss, not reduced.

        `tokens` is (B, T + 1): inputs and targets overlap by T - 1. With `last` the sum over ranks starts
        behind the backward.
        """
        self.model.train()
        if last:
            for unit in self.units:
                unit.expect_last_gradients()
        loss = self._loss(tokens)
        (loss * (self.loss_scale.scale / (micro_batches * self.topology.world_size))).backward()
        return loss.detach()

    def step(self, learning_rate: float) -> StepResult:
        """One AdamW step on the mean gradient of the micro-batches since the last step.

        Gradients with a NaN or Inf on any rank skip the step on every rank: all see the same sum.
        """
        for unit in self.units:
            unit.finish_reduction()
        norms = torch.stack([torch.linalg.vector_norm(unit.gradients) for unit in self.units])
        scale = self.loss_scale.scale
        grad_norm = torch.linalg.vector_norm(norms).item() / scale
        overflow = not math.isfinite(grad_norm)
        if not overflow:
            factor = clip_factor(grad_norm, self.clip_grad) / scale
            for unit in self.units:
                if factor != 1.0:
                    unit.gradients.mul_(factor)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
        for unit in self.units:
            if not overflow:
                unit.publish()
            unit.gradients.zero_()
        self.loss_scale.update(overflow)
        return StepResult(grad_norm, overflow, scale)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """The mean loss of `tokens` (B, T + 1) without dropout, not reduced over ranks."""
        self.model.eval()
        return self._loss(tokens)

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over all ranks."""
        return mean_over_ranks(value, self.topology)

    def weights(self) -> dict[str, Tensor]:
        """The fp32 master weights by the model's parameter names; writing them needs `publish` after."""
        return {name: view.detach() for name, view in self._master.items()}

    def publish(self) -> None:
        """Makes the model compute with the present master weights."""
        for unit in self.units:
            unit.publish()

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state as `exp_avg/NAME` and `exp_avg_sq/NAME`; empty before the first step."""
        return {
            f"{key}/{name}": self._adamw.state[weight][key]
            for name, weight in self._master.items()
            for key in ("exp_avg", "exp_avg_sq")
            if weight in self._adamw.state
        }

    def optimizer_steps(self) -> int:
        """Steps that AdamW has taken: the t of its bias correction."""
        states = [
            self._adamw.state[weight] for weight in self._master.values() if weight in self._adamw.state
        ]
        if states and "step" in states[0]:
            return int(states[0]["step"])
        return int(self._adamw.param_groups[0].get("step", 0))  # apex counts by group

    def load_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        """The inverse of `moments` and `optimizer_steps`."""
        if not moments:
            return
        state = {}
        for group in self._adamw.param_groups:
            group["step"] = steps  # read by apex, ignored by torch
            for weight in group["params"]:
                name = next(name for name, master in self._master.items() if master is weight)
                state[weight] = {
                    "step": torch.tensor(float(steps), device=self.device),
                    **{key: moments[f"{key}/{name}"].to(self.device) for key in ("exp_avg", "exp_avg_sq")},
                }
        self._adamw.state.update(state)

    def _loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device, non_blocking=True)
        return self.model(tokens[:, :-1], tokens[:, 1:])
