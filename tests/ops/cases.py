"""What the tests of kernels and reference share: arguments of the operators."""

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import QuantFormat
from tests.ops.awkward import sprinkled

CODE_TYPES = ("int8", "int4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def garbage(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An output buffer in which unwritten elements are noticed."""
    return torch.full(shape, 165, dtype=dtype)


def plain(format: QuantFormat) -> tuple[Any, ...]:
    """A format as the operators take it."""
    return format.code_type, format.block


def adamw_states(m: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weights, gradients in `dtype` and moments (m,); some gradients are tiny, huge or not finite."""
    generator = torch.Generator().manual_seed(m)
    master, exp_avg = torch.randn(2, m, generator=generator)
    gradient = sprinkled(m, dtype, seed=m)
    exp_avg_sq = torch.rand(m, generator=generator) ** 8
    exp_avg_sq[::7] = 0
    return [master, gradient, exp_avg, exp_avg_sq]


def adamw_scalars(
    found_inf: float = 0.0,
    divisor: float = 3.7,
    *,
    step: int = 3,
    learning_rate: float = 3e-4,
    weight_decay: float = 0.1,
    device: str = "cpu",
) -> AdamWScalars:
    """The scalars of one step, with betas of 0.9 and 0.95."""
    return AdamWScalars(
        divisor=torch.tensor(divisor, device=device),
        found_inf=torch.tensor(found_inf, device=device),
        bias_corrections=torch.tensor([1 - 0.9**step, 1 - 0.95**step], device=device),
        learning_rate=learning_rate,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=weight_decay,
    )
