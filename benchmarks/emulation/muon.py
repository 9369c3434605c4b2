"""Muon on the matrices inside layers: momentum, orthogonalised by Newton-Schulz iterations.

Names, coefficients and scales are Megatron-LM's (emerging_optimizers, orthogonalized_optimizers/muon.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.zero.newton_schulz import coefficients, orthogonalize_
from megatron_zpp.zero.row_moments import scale_rows_

SCALE = 0.2  # times √ of the longer side: updates then have the root mean square of AdamW's (2502.16982)


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """Muon for matrices; `scalar_lr` is AdamW's rate of everything else, in multiples of the matrices'.

    `beta2` is that of NorMuon's row scales (2510.05491); without it there are none.
    """

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    scalar_lr: float = 1.0
    coefficient_type: str = "quintic"
    num_ns_steps: int = 5
    split_qkv: bool = True
    beta2: float | None = None


class Muon:
    """The states of all matrices."""

    def __init__(
        self,
        momentum: Tensor,
        matrices: Mapping[tuple[int, int], Sequence[slice]],
        settings: MuonSettings,
        dtype: torch.dtype,
    ) -> None:
        """`momentum` (n,) fp32 is zero; `matrices` lie in it, by shape. The iterations run in `dtype`."""
        self._momentum, self._matrices, self.settings, self._dtype = momentum, matrices, settings, dtype
        self._squares = {
            shape: momentum.new_zeros(len(places), shape[0], 1) for shape, places in matrices.items()
        }

    def step(self, master: Tensor, gradient: Tensor, learning_rate: float, skip: Tensor) -> None:
        """Change `master` (n,) by the mean gradient (n,) fp32; where `skip` () is not 0 nothing changes."""
        settings, skipped = self.settings, skip != 0
        momentum = self._momentum.lerp(gradient, 1 - settings.momentum)
        direction = gradient.lerp(momentum, settings.momentum) if settings.nesterov else momentum
        update = torch.zeros_like(master)
        for shape, places in self._matrices.items():
            matrices = torch.stack([direction[here].view(shape) for here in places])
            matrices = orthogonalised(matrices, settings, self._dtype)
            if settings.beta2 is not None:
                scale_rows_(matrices, self._squares[shape], settings.beta2, skip)
            for here, matrix in zip(places, matrices * (SCALE * max(shape) ** 0.5), strict=True):
                update[here] = matrix.flatten()
        changed = master * (1 - learning_rate * settings.weight_decay) - learning_rate * update
        self._momentum.copy_(torch.where(skipped, self._momentum, momentum))
        master.copy_(torch.where(skipped, master, changed))


def orthogonalised(x: Tensor, settings: MuonSettings, dtype: torch.dtype) -> Tensor:
    """U · S' · Vᵀ (N, rows, columns) fp32 of matrices x = U · S · Vᵀ; S' lies around 1. Computes in `dtype`.

    The steps must be a multiple of the coefficients.
    """
    y = x.to(dtype, copy=True)
    orthogonalize_(y, coefficients(settings.coefficient_type, settings.num_ns_steps))
    return y.float()
