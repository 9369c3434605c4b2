"""An MLP of 8-bit products with delayed scaling, whose activation hands codes on to the products.

Shapes: R rows, D hidden size, F inner width, H = F or 2F outputs of the first map. The forward's activation
and its backward are one kernel each, which writes codes in both layouts; as (R, F) or (R, H) numbers of the
compute format they are not in memory. The input, and the gradient of the output, are cast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.fp8.cast import INPUT
from megatron_zpp.model.fp8.delayed import CodedInput, DelayedLinear, as_coded
from megatron_zpp.model.fp8.kernels.cast import cast, cast_gradients
from megatron_zpp.model.fp8.kernels.coded_activation import coded_activation, coded_activation_backward
from megatron_zpp.model.fp8.kernels.weight_codes import input_gradient, product, weight_gradient
from megatron_zpp.model.layer import MLP, gelu, swiglu


def serves(mlp: MLP) -> bool:
    """Whether `coded_mlp` can take the place of the module."""
    maps = mlp.input, mlp.output
    return all(type(part) is DelayedLinear for part in maps) and mlp.activation in (gelu, swiglu)


def coded_mlp(mlp: MLP, x: Tensor | CodedInput) -> Tensor:
    """(B, T, D) -> (B, T, D). The scales of both maps are known."""
    given = as_coded(x)
    first, second = mlp.input, mlp.output
    assert isinstance(first, DelayedLinear)
    assert isinstance(second, DelayedLinear)
    ahead, behind = first.product, second.product
    rows = _MLP.apply(
        *(given.carrier.flatten(0, -2), given.codes, given.columns),
        *(first.weight, first.bias, ahead.factors, ahead.maxima),
        *(second.weight, second.bias, behind.factors, behind.maxima),
        *(ahead.codes, behind.codes),
        mlp.activation is swiglu,
        torch.is_grad_enabled(),
    )
    return rows.unflatten(0, given.carrier.shape[:-1])


class _MLP(torch.autograd.Function):
    """(R, D) -> (R, D); `learns`: whether there will be a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Tensor | None,  # its codes by rows and by columns, if there are any
        turned: Tensor | None,
        weight: Tensor,  # (H, D)
        bias: Tensor | None,
        factors: Tensor,
        maxima: Tensor,
        next_weight: Tensor,  # (D, F)
        next_bias: Tensor | None,
        next_factors: Tensor,
        next_maxima: Tensor,
        held: Tensor | None,  # the weights as codes, if they are held so
        next_held: Tensor | None,
        gated: bool,
        learns: bool,
    ) -> Tensor:
        if given is None or turned is None:
            codes, columns = cast(x.contiguous(), factors, maxima, INPUT, rows=True, columns=learns)
        else:
            codes, columns = given, turned
        inner = product(codes, weight, held, factors, maxima, x.dtype)  # (R, H)
        next_codes, next_columns = coded_activation(inner, bias, next_factors, next_maxima, gated, learns)
        out = product(next_codes, next_weight, next_held, next_factors, next_maxima, x.dtype)
        ctx.save_for_backward(
            *(columns, inner, weight, bias, factors, maxima),
            *(next_columns, next_weight, next_factors, next_maxima, held, next_held),
        )
        ctx.gated = gated
        return out if next_bias is None else out + next_bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, inner, weight, bias, factors, maxima, *second = ctx.saved_tensors
        next_columns, next_weight, next_factors, next_maxima, held, next_held = second
        dtype, wanted = gradient.dtype, ctx.needs_input_grad
        rows, turned, sums = cast_gradients((gradient,), next_factors, next_maxima, sums=wanted[8])
        of_next_bias = sums.to(dtype) if wanted[8] else None
        of_out = input_gradient(rows, next_weight, next_held, next_factors, next_maxima, dtype)  # (R, F)
        of_next = weight_gradient(turned, next_columns, next_factors, dtype)
        rows, turned, sums = coded_activation_backward(of_out, inner, bias, factors, maxima, ctx.gated)
        of_x = input_gradient(rows, weight, held, factors, maxima, dtype)
        of_weight = weight_gradient(turned, columns, factors, dtype)
        of_bias = None if bias is None else sums.to(dtype)
        of_first = (of_x, None, None, of_weight, of_bias, None, None)
        return *of_first, of_next, of_next_bias, *[None] * 6
