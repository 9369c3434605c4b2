"""AdamW (Decoupled Weight Decay Regularization, 1711.05101, algorithm 2): scalars, and the reference step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamWScalars:
    """The arguments of a step besides the tensors of a shard; the same for all shards of a step.

    The tensors are fp32 and on the device of the states, so that a step does not wait for the device.
    """

    divisor: Tensor  # (); gradients are divided by it
    found_inf: Tensor  # (); the step is skipped unless this is 0
    bias_corrections: Tensor  # (2,); 1 - beta1^t and 1 - beta2^t in step t
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def packed(self) -> tuple[list[Tensor], list[float]]:
        """The scalars as two lists, `device_scalars` and `host_scalars`.

        A torch operator's schema allows tensors, numbers, strings and lists of them, but no dataclass. The
        order is that of the fields, which `unpacked` of csrc/bindings.cpp knows too.
        """
        on_device = [self.divisor, self.found_inf, self.bias_corrections]
        return on_device, [self.learning_rate, self.beta1, self.beta2, self.eps, self.weight_decay]

    @staticmethod
    def unpacked(device_scalars: Sequence[Tensor], host_scalars: Sequence[float]) -> "AdamWScalars":
        """The inverse of `packed`."""
        divisor, found_inf, bias_corrections = device_scalars
        return AdamWScalars(divisor, found_inf, bias_corrections, *host_scalars)


def adamw_step(
    scalars: AdamWScalars,
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    decayed: int,
    compact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """New weights and moments in plain torch, where every line is one rounding of the specification.

    Numbers are rounded to fp32 when a tensor is multiplied by them; products of two numbers are in fp64. The
    first `decayed` weights decay. `compact`: the step on states in fewer bytes, with one division per
    element, as `compact_weight` of csrc/.
    """
    beta1, beta2, (correction1, correction2) = scalars.beta1, scalars.beta2, scalars.bias_corrections
    # A 0-dim tensor, not a number: torch on a GPU would multiply by the reciprocal of a number.
    rate = torch.full_like(scalars.divisor, scalars.learning_rate) / correction1
    root2 = _root(correction2)
    g, w = gradient.float() * scalars.divisor.reciprocal(), weights.clone()
    with_decay = w[: max(decayed, 0)]
    with_decay.sub_(with_decay * (scalars.learning_rate * scalars.weight_decay))
    m = exp_avg * beta1 + g * (1 - beta1)
    v = exp_avg_sq * beta2 + (g * g) * (1 - beta2)
    if compact:
        return w - (m / (_root(v) + root2 * scalars.eps)) * (rate * root2), m, v
    return w - (m / (_root(v) / root2 + scalars.eps)) * rate, m, v


def _root(x: Tensor) -> Tensor:
    """The correctly rounded fp32 root; torch's own fp32 root on a CPU is sometimes off by one bit."""
    return x.double().sqrt().float()
