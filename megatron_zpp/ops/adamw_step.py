"""AdamW's arithmetic, a rounding a line of the specification: the reference's.

Decoupled Weight Decay Regularization (1711.05101), algorithm 2.
"""

import torch
from torch import Tensor


class AdamWStep:
    """One step. Numbers become fp32 where they meet a tensor, products of two numbers before that."""

    def __init__(
        self,
        divisor: Tensor,
        bias_corrections: Tensor,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        correction1, correction2 = bias_corrections
        self.inverse = divisor.reciprocal()
        # A 0-dim tensor, not a number: torch on a GPU would multiply by a number's reciprocal.
        self.rate = torch.full_like(divisor, learning_rate) / correction1
        self.root2 = _root(correction2)
        self.decay = learning_rate * weight_decay
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def __call__(
        self, master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, here: slice, decayed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New weights and moments of the elements `here`."""
        g, w = gradient[here].float() * self.inverse, master[here].clone()
        inside = w[: max(min(decayed, here.stop) - here.start, 0)]
        inside.sub_(inside * self.decay)
        m = exp_avg[here] * self.beta1 + g * (1 - self.beta1)
        v = exp_avg_sq[here] * self.beta2 + (g * g) * (1 - self.beta2)
        denominator = _root(v) / self.root2 + self.eps
        return w - (m / denominator) * self.rate, m, v


def _root(x: Tensor) -> Tensor:
    """The fp32 number nearest the root: torch's own fp32 root on a CPU is off by one place now and then."""
    return x.double().sqrt().float()
