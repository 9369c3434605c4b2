"""LayerNorm or RMSNorm, and the residual sum before it, whose result is codes for an 8-bit product.

Shapes: B batch, T tokens, D hidden size, R = B · T rows. The norm itself is in memory as codes only, in both
layouts. A program has a row, as in model/fused/norm.py, whose backward this is too; codes by columns are
turned from those by rows by a kernel of their own, since a tile of many rows would be read twice. Codes are
those of fp32 numbers: a norm is not rounded to the format of the compute first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8.cast import INPUT
from megatron_zpp.model.fp8.delayed import CodedInput, DelayedLinear
from megatron_zpp.model.fp8.kernels.cast import encode, keep_maximum, outputs, turn
from megatron_zpp.model.fused.norm import _shape, gradients, normalise, settings, without_contents
from megatron_zpp.model.layer import Norm

_KIND = tl.constexpr(INPUT)


def coded_norm(
    x: Tensor,
    module: Norm,
    linear: DelayedLinear,
    added: Tensor | None = None,
    token: Tensor | None = None,
) -> tuple[Tensor, CodedInput]:
    """As fused/norm.norm, with the norm as the input of `linear`, whose scales are known."""
    product, columns = linear.product, torch.is_grad_enabled()
    total, carrier, codes, turned = _CodedNorm.apply(
        *(x if added is None else x.detach(), added, token, *settings(module)),
        *(product.factors, product.maxima, columns),
    )
    return total, CodedInput(carrier, codes, turned)


class _CodedNorm(torch.autograd.Function):
    """As fused/norm's operator: the sum or a token, what carries the gradient of the norm, and its codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        token: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float,
        factors: Tensor,
        maxima: Tensor,
        columns: bool,
    ) -> tuple[Tensor, ...]:
        total, mean, rstd, codes, turned = _coded_norm(
            *(x, added, weight, bias, eps, offset), factors, maxima, columns
        )
        ctx.added, ctx.offset = None if added is None else added.dtype, offset
        ctx.save_for_backward(x if added is None else total, weight, mean, rstd)
        ctx.sums = 1 if bias is None else 2
        ctx.mark_non_differentiable(codes, turned)
        carrier = without_contents(x, weight.dtype)
        return without_contents(x) if added is None else total, carrier, codes, turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_normed: Tensor, *_: Tensor) -> tuple[Any, ...]:
        return *gradients(ctx, of_total, of_normed)[:7], None, None, None


@triton_op("megatron_zpp_model::coded_norm", mutates_args={"maxima"})
def _coded_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    factors: Tensor,
    maxima: Tensor,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum (B, T, D), mean and 1 / deviation (B, T), codes by rows (R, D) and columns (D, R).

    Without `added` the sum, without a bias the mean and without `columns` the last have no elements.
    """
    width, adds, centred = x.shape[-1], added is not None, bias is not None
    rows = x.numel() // width
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else rstd.new_empty(0)
    total = torch.empty_like(x) if adds else x.new_empty(0)
    codes, turned = outputs(x, rows, width, INPUT, by_rows=True, by_columns=columns)
    # Where there is no sum or no bias another tensor is passed, and not touched.
    wrap_triton(_coded_norm_kernel)[(rows,)](
        *(x, x if added is None else added, weight, weight if bias is None else bias),
        *(total, mean, rstd, factors, maxima, codes, width, eps),
        ADDS=adds,
        CENTRED=centred,
        OFFSET=offset,
        **_shape(width),
    )
    if columns:
        turn(codes, turned)
    return total, mean, rstd, codes, turned


@triton.jit
def _coded_norm_kernel(
    x_ptr,  # (R, D), as are added and total
    added_ptr,
    weight_ptr,  # (D), as is bias
    bias_ptr,
    total_ptr,
    mean_ptr,  # (R) fp32, as is rstd
    rstd_ptr,
    factors_ptr,  # (2, 3, 4) fp32
    maxima_ptr,  # (3,) fp32
    by_rows_ptr,  # (R, D)
    width,
    eps,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    # fmt: off
    normed = normalise(
        x_ptr, added_ptr, weight_ptr, bias_ptr, total_ptr, mean_ptr, rstd_ptr, row, columns, width, eps,
        ADDS, CENTRED, OFFSET,
    )
    # fmt: on
    scaled, sizes = encode(normed, tl.load(factors_ptr + 4 * _KIND))
    keep_maximum(maxima_ptr, sizes, _KIND)
    codes = scaled.to(by_rows_ptr.dtype.element_ty)
    tl.store(by_rows_ptr + row * width + columns, codes, mask=columns < width)
