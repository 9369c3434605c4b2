"""AdamW (1711.05101, algorithm 2): by the project's kernel, by torch's fused one, and by NVIDIA apex."""

from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.held_states import MOMENTUM
from megatron_zpp.zero.optimizer import (
    DeviceOptimizer,
    OffloadedOptimizer,
    Optimizer,
    Rates,
    ShardSegment,
    UpdateRule,
    Write,
    zero_states,
)
from megatron_zpp.zero.sharded_unit import Unit

MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")  # the states of AdamW, as checkpoints name them


def build_optimizer(
    config: OptimizerConfig,
    units: list[Unit],
    communication: Communication,
    backend: Literal["apex", "torch"],
    operations: Operations | None,
    write: Write,
    rule: UpdateRule | None = None,
) -> Optimizer:
    """The optimizer of `rule`; without one, AdamW of the fused backend, or of torch without `operations`.

    Raises ValueError for several learning rates where the optimizer has one, and for states in fewer bytes
    where they are not AdamW's, or without operations; and for a rule with a state of Muon's name.
    """
    plan = communication.plan
    if config.compact and (rule is not None or operations is None or backend == "apex"):
        fix = "needs the project's AdamW, on its operations (ops/library.py)"
        raise option_error("--use-precision-aware-optimizer", "(given)", fix)
    if config.optimizer == "muon" and rule is not None and MOMENTUM in rule.state_names:
        raise option_error("optimizer", MOMENTUM, "is the name of Muon's state; give the rule's another")
    if backend == "apex":
        for placement in (each for unit in units for each in unit.layout.placements):
            if placement.decoupled or placement.rate_factor != 1:
                flag = "--decoupled-lr" if placement.decoupled else "--use-mup"
                raise option_error(flag, "(given)", "needs --fused-backend torch")
        return ApexAdamW(config, units, write)

    def rule_of(factor: float) -> UpdateRule:
        if rule is not None:
            return rule
        scaled = replace(config, adam_eps=config.adam_eps * factor)
        if operations is None:
            return TorchAdamW(scaled)
        return KernelAdamW(scaled, operations, plan.weight_codes)

    if config.optimizer == "muon":
        from megatron_zpp.zero.muon import MuonOptimizer

        assert communication.matrices is not None
        dtype = torch.float32 if plan.made == torch.float32 else torch.bfloat16
        return MuonOptimizer(config, rule_of, units, write, plan.mesh, communication.matrices, dtype)
    offloaded = units[0].master.device != units[0].gather_source.device
    forms = {} if rule is not None else config.forms_of_moments
    return (OffloadedOptimizer if offloaded else DeviceOptimizer)(rule_of, units, write, forms)


# The scalars of a step, and the number of the step, which random bits depend on.
KernelScalars: TypeAlias = tuple[AdamWScalars, Tensor]


class KernelAdamW:
    """AdamW by the project's kernel: one pass over memory, which also writes the gather source.

    On states in fewer bytes (--use-precision-aware-optimizer) the pass rounds the states, and writes 16-bit
    gather sources; messages are written from the weights.
    """

    state_names = MOMENTS

    def __init__(
        self, config: OptimizerConfig, operations: Operations, quant_format: QuantFormat | None = None
    ) -> None:
        """`quant_format` is that of the messages to gather from; None: weights in the compute dtype."""
        self._config, self._operations, self._quant_format = config, operations, quant_format
        self.accepts_16bit_gradients = quant_format is None
        self.writes_gather_source = quant_format is None or not config.compact

    def scalars(
        self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor
    ) -> KernelScalars:
        config = self._config
        powers = [beta ** steps.double() for beta in (config.adam_beta1, config.adam_beta2)]
        scalars = AdamWScalars(
            divisor=divisor,
            found_inf=found_inf,
            bias_corrections=(1 - torch.stack(powers)).float(),
            learning_rate=learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        return scalars, steps

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: KernelScalars) -> None:
        (exp_avg, exp_avg_sq), gather_source, decayed = shard.states, shard.gather_source, shard.decayed
        if self._config.compact:
            from megatron_zpp.ops.state_codes import Rounding  # which few runs need

            of_avg, of_avg_sq = shard.scales
            compact = shard.master, gradient, exp_avg, of_avg, exp_avg_sq, of_avg_sq
            rounding = Rounding(scalars[1], shard.unit, shard.first)
            self._operations.adamw_compact(*compact, gather_source, scalars[0], rounding, decayed=decayed)
            return
        states = shard.master, gradient, exp_avg, exp_avg_sq
        # A unit of which nothing is sent has weights there, whatever others have.
        if self._quant_format is None or gather_source is None or gather_source.dtype != torch.uint8:
            self._operations.adamw(*states, gather_source, scalars[0], decayed=decayed)
            return
        format = self._quant_format
        self._operations.adamw_quantize(*states, gather_source, format, scalars[0], decayed=decayed)


TorchAdamWScalars: TypeAlias = tuple[Tensor, float, Tensor, Tensor]  # as `scalars` gets them


class TorchAdamW:
    """AdamW by torch's fused kernel, and a cast."""

    state_names = MOMENTS
    accepts_16bit_gradients = False
    writes_gather_source = True

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def scalars(
        self, steps: Tensor, learning_rate: float, divisor: Tensor, found_inf: Tensor
    ) -> TorchAdamWScalars:
        return steps, learning_rate, divisor, found_inf

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: TorchAdamWScalars) -> None:
        config, tensors = self._config, (shard.master, gradient, *shard.states)
        steps, learning_rate, divisor, found_inf = scalars
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
                    [steps],
                    lr=learning_rate,
                    beta1=config.adam_beta1,
                    beta2=config.adam_beta2,
                    weight_decay=weight_decay,
                    eps=config.adam_eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                    found_inf=found_inf,
                )
        if shard.gather_source is not None:
            shard.gather_source.copy_(shard.master)


class ApexAdamW(Optimizer):
    """NVIDIA apex's FusedAdam. The host reads `found_inf` and `steps`, so each step waits for the device."""

    state_names = MOMENTS

    def __init__(self, config: OptimizerConfig, units: list[Unit], write: Write) -> None:
        from apex.optimizers import FusedAdam

        self._units, self._write = units, write
        self.states = [zero_states(unit, MOMENTS) for unit in units]
        self.steps = torch.zeros((), device=units[0].master.device)
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)
        ]
        # Unit, its elements with or without weight decay, and weights of these.
        self._weights: list[tuple[Unit, slice, Tensor]] = []
        adam_states = {}
        for unit, moments in zip(units, self.states, strict=True):
            parts = slice(unit.decayed), slice(unit.decayed, None)
            for part, group in zip(parts, groups, strict=True):
                weight = unit.master[part].detach()
                if len(weight):
                    self._weights.append((unit, part, weight))
                    group["params"].append(weight)
                    adam_states[weight] = {name: moments[name].values[part] for name in MOMENTS}
        betas = (config.adam_beta1, config.adam_beta2)
        self._adam = FusedAdam(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=config.adam_eps
        )
        self._adam.state.update(adam_states)

    def begin_step(self, rates: Rates, divisor: Tensor, found_inf: Tensor) -> None:
        """See Optimizer.begin_step. All units change here."""
        if found_inf.item():
            return
        for unit, part, weight in self._weights:
            weight.grad = unit.gradient[part]
        for group in self._adam.param_groups:
            group["lr"], group["step"] = rates[0], int(self.steps.item())
            torch._foreach_div_([weight.grad for weight in group["params"]], divisor)
        self._adam.step()
        self.steps += 1
        for _, _, weight in self._weights:
            weight.grad = None  # only the unit decides when the gradient is freed

    def update(self, index: int) -> None:
        self._write(self._units[index], None)
