"""LayerNorm or RMSNorm, and the residual sum before it, whose result is codes for an 8-bit product.

Shapes: B batch, T tokens, D hidden size, R = B · T rows. The norm itself is in memory as codes only, in both
layouts. A program has some rows and goes through their columns two or three times, for the mean, the
deviation and the codes: memory is read once, the cache again. Numbers are rounded to the format of the
compute before they become codes. The backward is that of model/fused/norm.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8_cast import INPUT, LARGEST
from megatron_zpp.model.fp8_delayed import CodedInput, DelayedLinear
from megatron_zpp.model.fused.cast import encode, keep_maximum, outputs, store_codes
from megatron_zpp.model.fused.norm import _norm_backward

_ROWS, _COLUMNS, _WARPS = 32, 128, 8  # of a program at a time: 16 elements a thread


def coded_norm(
    x: Tensor, module: nn.LayerNorm | nn.RMSNorm, linear: DelayedLinear
) -> tuple[CodedInput, Tensor]:
    """(B, T, D) -> the norm as the input of `linear`, and a token for `coded_add_norm`.

    As fused/norm.norm; the scales of `linear` are known.
    """
    product, columns = linear.product, torch.is_grad_enabled()
    bias = module.bias if isinstance(module, nn.LayerNorm) else None
    carrier, token, codes, turned = _Norm.apply(
        x, module.weight, bias, module.eps, product.factors, product.maxima, columns
    )
    return CodedInput(carrier, codes, turned), token


def coded_add_norm(
    x: Tensor, added: Tensor, token: Tensor, module: nn.LayerNorm | nn.RMSNorm, linear: DelayedLinear
) -> tuple[Tensor, CodedInput]:
    """x + added (B, T, D) and its norm as the input of `linear`; `token` as in fused/norm.add_norm."""
    product, columns = linear.product, torch.is_grad_enabled()
    bias = module.bias if isinstance(module, nn.LayerNorm) else None
    total, carrier, codes, turned = _AddNorm.apply(
        *(x.detach(), added, token, module.weight, bias, module.eps),
        *(product.factors, product.maxima, columns),
    )
    return total, CodedInput(carrier, codes, turned)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        factors: Tensor,
        maxima: Tensor,
        columns: bool,
    ) -> tuple[Tensor, ...]:
        _, mean, rstd, codes, turned = _coded_norm(x, None, weight, bias, eps, factors, maxima, columns)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.sums = 1 if bias is None else 2
        ctx.mark_non_differentiable(codes, turned)
        return _without_contents(x), _without_contents(x), codes, turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_normed: Tensor, of_token: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = _gradients(ctx, of_normed, of_token)
        return of_x, of_weight, of_bias, None, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor,
        token: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        factors: Tensor,
        maxima: Tensor,
        columns: bool,
    ) -> tuple[Tensor, ...]:
        total, mean, rstd, codes, turned = _coded_norm(x, added, weight, bias, eps, factors, maxima, columns)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.sums = 1 if bias is None else 2
        ctx.mark_non_differentiable(codes, turned)
        return total, _without_contents(x), codes, turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_normed: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = _gradients(ctx, of_normed, of_total)
        return None, of_x, of_x, of_weight, of_bias, None, None, None, None


def _without_contents(x: Tensor) -> Tensor:
    """A tensor of the shape of x that only carries a gradient."""
    return x.new_empty(1).expand(x.shape)


def _gradients(ctx: Any, of_normed: Tensor, of_x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight, mean, rstd = ctx.saved_tensors
    of_x, sums = _norm_backward(of_normed.contiguous(), of_x.contiguous(), x, weight, mean, rstd, ctx.sums)
    of_weight, *of_bias = sums.to(weight.dtype).unbind()
    return of_x, of_weight, of_bias[0] if of_bias else None


@triton_op("megatron_zpp_model::coded_norm", mutates_args={"maxima"})
def _coded_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
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
    wrap_triton(_coded_norm_kernel)[(triton.cdiv(rows, _ROWS),)](
        *(x, x if added is None else added, weight, weight if bias is None else bias),
        *(total, mean, rstd, factors, maxima, codes, turned, rows, width, eps),
        ADDS=adds,
        CENTRED=centred,
        BY_COLUMNS=columns,
        KIND=INPUT,
        LARGEST=LARGEST[INPUT],
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return total, mean, rstd, codes, turned


@triton.jit
def _summed(x_ptr, added_ptr, row, column, height, width, ADDS: tl.constexpr):
    """A tile of x, or of the sum as it is kept, in fp32."""
    inside = (row < height)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


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
    by_columns_ptr,  # (D, R)
    height,
    width,
    eps,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros([ROWS], tl.float32)
    if CENTRED:
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            mean += tl.sum(_summed(x_ptr, added_ptr, row, column, height, width, ADDS), axis=1)
        mean = mean / width
        tl.store(mean_ptr + row, mean, mask=row < height)
    squares = tl.zeros([ROWS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = _summed(x_ptr, added_ptr, row, column, height, width, ADDS)
        centred = tl.where((column < width)[None, :], x - mean[:, None], 0.0)
        squares += tl.sum(centred * centred, axis=1)
    rstd = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < height)
    factor = tl.load(factors_ptr + 4 * KIND)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < height)[:, None] & (column < width)[None, :]
        x = _summed(x_ptr, added_ptr, row, column, height, width, ADDS)
        if ADDS:
            at = row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(total_ptr + at, x.to(total_ptr.dtype.element_ty), mask=inside)
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        normed = (x - mean[:, None]) * rstd[:, None] * weight[None, :]
        if CENTRED:
            bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
            normed += bias[None, :]
        normed = tl.where(inside, normed.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)
        scaled, sizes = encode(normed, factor, LARGEST)
        largest = tl.maximum(largest, sizes)
        store_codes(by_rows_ptr, by_columns_ptr, scaled, row, column, inside, height, width, True, BY_COLUMNS)
    keep_maximum(maxima_ptr, largest, KIND)
