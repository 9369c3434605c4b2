"""GELU and SwiGLU between two maps of 8-bit products: codes of what they make, in both layouts, in one pass.

Shapes: R rows, F inner width, H = F (GELU) or 2F (SwiGLU: gate and value) outputs of the first map, P
programs along the rows. The first map's outputs come without its bias, which is added here. Numbers are
rounded to the format of the compute before they become codes, as if they had been written and cast.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8_cast import GRADIENT, INPUT, LARGEST
from megatron_zpp.model.fused.cast import encode, grid, keep_maximum, outputs, pack, rounded, store_turned
from megatron_zpp.model.fused.math import exp2, reciprocal

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _SLOPE
_GROUPS, _COLUMNS, _WARPS = 32, 64, 8  # of a program: 128 rows, 32 elements a thread and input


@triton_op("megatron_zpp_model::coded_activation", mutates_args={"maxima"})
def coded_activation(
    x: Tensor, bias: Tensor | None, factors: Tensor, maxima: Tensor, gated: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """The codes of the activation of x (R, H) by rows (R, F) and, if wanted, by columns (F, R).

    `factors` and `maxima` are those of the second map, see model/fp8_cast.py.
    """
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    by_rows, by_columns = outputs(x, rows, width, INPUT, by_rows=True, by_columns=columns)
    wrap_triton(_forward_kernel)[grid(rows, width, _GROUPS, _COLUMNS)](
        *(x, x if bias is None else bias, factors, maxima, by_rows, by_columns, rows, width),
        KIND=INPUT,
        LARGEST=LARGEST[INPUT],
        GATED=gated,
        BIASED=bias is not None,
        BY_COLUMNS=columns,
        SLOPE=_SLOPE,
        CUBIC=_CUBIC,
        GROUPS=_GROUPS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return by_rows, by_columns


@triton_op("megatron_zpp_model::coded_activation_backward", mutates_args={"maxima"})
def coded_activation_backward(
    of_out: Tensor, x: Tensor, bias: Tensor | None, factors: Tensor, maxima: Tensor, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of the gradient of x by rows (R, H) and by columns (H, R), and its sums over rows (H) fp32.

    `of_out` (R, F) is the gradient of the activation; `factors` and `maxima` are those of the first map.
    Without a bias there are no sums (0).
    """
    rows, width = of_out.shape
    by_rows, by_columns = outputs(x, rows, x.shape[1], GRADIENT, by_rows=True, by_columns=True)
    programs = grid(rows, width, _GROUPS, _COLUMNS)
    biased = bias is not None
    sums = torch.empty(programs[1] if biased else 0, x.shape[1], dtype=torch.float32, device=x.device)
    wrap_triton(_backward_kernel)[programs](
        *(of_out, x, x if bias is None else bias, factors, maxima, by_rows, by_columns, sums, rows, width),
        KIND=GRADIENT,
        LARGEST=LARGEST[GRADIENT],
        GATED=gated,
        BIASED=biased,
        SLOPE=_SLOPE,
        CUBIC=_CUBIC,
        GROUPS=_GROUPS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return by_rows, by_columns, sums.sum(0) if biased else sums.new_empty(0)


@triton.jit
def _load(x_ptr, bias, at, inside, outside, BIASED: tl.constexpr):
    """A tile of x plus the bias (COLUMNS), in fp32, rounded to the format of x; or `outside`."""
    x = tl.load(x_ptr + at, mask=inside, other=outside)
    if BIASED:
        x = (x.to(tl.float32) + bias[None, :]).to(x_ptr.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def _forward_kernel(
    x_ptr,  # (R, H)
    bias_ptr,  # (H)
    factors_ptr,
    maxima_ptr,
    by_rows_ptr,  # (R, F)
    by_columns_ptr,  # (F, R)
    height,
    width,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    LOG2_E: tl.constexpr = 1.4426950408889634
    stride = 2 * width if GATED else width
    factor = tl.load(factors_ptr + 4 * KIND)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    bias_up = bias
    if GATED:
        bias_up = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    words = tl.zeros([GROUPS, COLUMNS], tl.int32)
    largest = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for place in tl.static_range(4):
        row = 4 * group + place
        inside = (row < height)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * stride + column[None, :]
        gate = _load(x_ptr, bias, at, inside, float("nan"), BIASED)  # does not count for the maxima
        if GATED:
            up = _load(x_ptr + width, bias_up, at, inside, 0.0, BIASED)
            out = gate * reciprocal(1 + exp2(gate * -LOG2_E)) * up
        else:
            out = gate * reciprocal(1 + exp2(gate * (SLOPE + CUBIC * gate * gate) * -LOG2_E))
        scaled, sizes = encode(out.to(x_ptr.dtype.element_ty).to(tl.float32), factor, LARGEST)
        largest = tl.maximum(largest, sizes)
        codes = rounded(scaled, by_rows_ptr.dtype.element_ty)
        tl.store(by_rows_ptr + row.to(tl.int64)[:, None] * width + column[None, :], codes, mask=inside)
        words = pack(words, codes, place)
    keep_maximum(maxima_ptr, largest, KIND)
    if BY_COLUMNS:
        store_turned(by_columns_ptr, words, group, column, height, width)


@triton.jit
def _backward_kernel(
    of_out_ptr,  # (R, F)
    x_ptr,  # (R, H)
    bias_ptr,  # (H)
    factors_ptr,
    maxima_ptr,
    by_rows_ptr,  # (R, H)
    by_columns_ptr,  # (H, R)
    sums_ptr,  # (P, H) fp32
    height,
    width,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    LOG2_E: tl.constexpr = 1.4426950408889634
    stride = 2 * width if GATED else width
    factor = tl.load(factors_ptr + 4 * KIND)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    bias_up = bias
    if GATED:
        bias_up = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    words = tl.zeros([GROUPS, COLUMNS], tl.int32)
    words_up = tl.zeros([GROUPS, COLUMNS], tl.int32)
    largest = tl.zeros([GROUPS, COLUMNS], tl.float32)
    total = tl.zeros([GROUPS, COLUMNS], tl.float32)
    total_up = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for place in tl.static_range(4):
        row = 4 * group + place
        inside = (row < height)[:, None] & (column < width)[None, :]
        out_at = row.to(tl.int64)[:, None] * width + column[None, :]
        of_out = tl.load(of_out_ptr + out_at, mask=inside, other=0.0).to(tl.float32)
        at = row.to(tl.int64)[:, None] * stride + column[None, :]
        gate = _load(x_ptr, bias, at, inside, 0.0, BIASED)
        if GATED:
            up = _load(x_ptr + width, bias_up, at, inside, 0.0, BIASED)
            share = reciprocal(1 + exp2(gate * -LOG2_E))
            gradient = of_out * up * share * (1 + gate * (1 - share))
            of_up = of_out * gate * share
            total_up += of_up
            scaled, sizes = encode(of_up.to(x_ptr.dtype.element_ty).to(tl.float32), factor, LARGEST)
            largest = tl.maximum(largest, sizes)
            codes = rounded(scaled, by_rows_ptr.dtype.element_ty)
            tl.store(by_rows_ptr + width + at, codes, mask=inside)
            words_up = pack(words_up, codes, place)
        else:
            square = CUBIC * gate * gate
            share = reciprocal(1 + exp2(gate * (SLOPE + square) * -LOG2_E))
            gradient = of_out * share * (1 + gate * (1 - share) * (SLOPE + 3 * square))
        total += gradient
        scaled, sizes = encode(gradient.to(x_ptr.dtype.element_ty).to(tl.float32), factor, LARGEST)
        largest = tl.maximum(largest, sizes)
        codes = rounded(scaled, by_rows_ptr.dtype.element_ty)
        tl.store(by_rows_ptr + at, codes, mask=inside)
        words = pack(words, codes, place)
    keep_maximum(maxima_ptr, largest, KIND)
    store_turned(by_columns_ptr, words, group, column, height, width)
    sums = sums_ptr + tl.program_id(1) * stride + column
    if BIASED:
        tl.store(sums, tl.sum(total, axis=0), mask=column < width)
    if GATED:
        turned_up_ptr = by_columns_ptr + tl.full([], width, tl.int64) * height
        store_turned(turned_up_ptr, words_up, group, column, height, width)
        if BIASED:
            tl.store(sums + width, tl.sum(total_up, axis=0), mask=column < width)
