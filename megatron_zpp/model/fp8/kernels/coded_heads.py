"""The map into heads by 8-bit products with delayed scaling, whose three gradients are joined as codes.

Shapes: B batch, T tokens, R = B · T rows, D hidden size, N query heads, G heads of keys and values, H head
width, W = (N + 2G) · H. As (R, W) numbers of the compute format the gradients are not in memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.fp8.delayed import CodedInput, DelayedLinear
from megatron_zpp.model.fp8.kernels.cast import cast_gradients
from megatron_zpp.model.fp8.kernels.weight_codes import input_gradient, product, weight_gradient


def coded_heads(
    x: CodedInput, linear: DelayedLinear, heads: int, groups: int, head_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, D) -> queries (B, T, N, H), keys and values (B, T, G, H), views of what the map makes."""
    product = linear.product
    parts = _Heads.apply(
        *(x.carrier.flatten(0, -2), x.codes, x.columns, linear.weight, linear.bias),
        *(product.factors, product.maxima, product.codes, heads * head_width, groups * head_width),
    )
    q, k, v = (part.unflatten(0, x.carrier.shape[:2]).unflatten(-1, (-1, head_width)) for part in parts)
    return q, k, v


class _Heads(torch.autograd.Function):
    """Codes of (R, D) -> (R, N · H) and twice (R, G · H)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # only carries a gradient
        codes: Tensor,
        columns: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factors: Tensor,
        maxima: Tensor,
        held: Tensor | None,  # the weight as codes, if it is held so
        queries: int,
        keys: int,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(columns, weight, factors, maxima, held)
        out = product(codes, weight, held, factors, maxima, rows.dtype)
        return (out if bias is None else out + bias).split([queries, keys, keys], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        columns, weight, factors, maxima, held = ctx.saved_tensors
        biased, dtype = ctx.needs_input_grad[4], gradients[0].dtype
        by_rows, by_columns, sums = cast_gradients(gradients, factors, maxima, sums=biased)
        of_x = input_gradient(by_rows, weight, held, factors, maxima, dtype)
        of_weight = weight_gradient(by_columns, columns, factors, dtype)
        return of_x, None, None, of_weight, sums.to(dtype) if biased else None, *[None] * 5
