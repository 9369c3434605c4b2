"""Linear layers whose matrix products take 8-bit floats, scaled a tensor at a time as each is made.

Weights and activations are E4M3, gradients E5M2, with fp32 sums ("FP8 Formats for Deep Learning",
arXiv 2209.05433, sections 3 and 4). A tensor is multiplied by 448 (E4M3) or 57344 (E5M2) over its largest
magnitude, so that this one is exact and nothing overflows; a NaN or Inf in it makes the whole product NaN.
Parameters stay in the compute dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.model.fp8.cast import SMALLEST


class Float8Linear(nn.Linear):
    """nn.Linear with products of 8-bit floats; widths are multiples of 16.

    So is the number of rows where there are gradients, since the weights' are a product over them.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of the input: fp32 or a 16-bit one."""
        rows = float8_linear(input.flatten(0, -2), self.weight, self.bias)
        return rows.unflatten(0, input.shape[:-1])


def float8_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of rows (R, in) and a weight (out, in), whose product is of 8-bit floats; see Float8Linear."""
    return _Product.apply(rows, weight, bias)


class _Product(torch.autograd.Function):
    """x @ weight.T + bias; (M, K), (N, K), (N) -> (M, N).

    cuBLASLt takes the right factor by columns alone, so that each tensor is laid out for its product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        codes, scale = _encode(x, torch.float8_e4m3fn)
        weight_codes, weight_scale = _encode(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(codes, scale, weight)
        out = multiply(codes, weight_codes.t(), scale, weight_scale, x.dtype, fast=True)
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale, weight = ctx.saved_tensors
        dtype = gradient.dtype
        incoming, incoming_scale = _encode(gradient, torch.float8_e5m2)
        weight_codes, weight_scale = _encode(weight, torch.float8_e4m3fn)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = multiply(incoming, _by_columns(weight_codes), incoming_scale, weight_scale, dtype)
        if ctx.needs_input_grad[1]:
            left = incoming.t().contiguous()
            of_weight = multiply(left, _by_columns(codes), incoming_scale, scale, dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)
        return of_x, of_weight, of_bias


def _encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes, and the fp32 scalar () that gives x back when they are multiplied by it."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=SMALLEST) / largest
    codes = (x.float() / scale).clamp(-largest, largest).to(dtype)  # rounding may lead above the largest
    return codes, scale


def _by_columns(codes: Tensor) -> Tensor:
    """(M, N), the numbers of a column next to each other."""
    return codes.t().contiguous().t()


def multiply(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """(M, K) by rows, (K, N) by columns -> (M, N); `fast` lets sums of products have fewer bits than fp32."""
    return torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
    )
