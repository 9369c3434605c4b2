"""GELU and SwiGLU between two maps of 8-bit products: codes of what they make, in both layouts, in one pass.

Shapes: R rows, F inner width, H = F (GELU) or 2F (SwiGLU: gate and value) outputs of the first map, P
programs along the rows. The first map's outputs come without its bias, which is added here. Codes are those
of fp32 numbers: what a program computes is not rounded to the format of the compute first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8.cast import GRADIENT, INPUT
from megatron_zpp.model.fp8.kernels.cast import (
    WARPS,
    encode,
    grid,
    keep_maximum,
    outputs,
    packed,
    store_turned,
    tile,
)
from megatron_zpp.model.fused.math import GELU_CUBIC, GELU_SLOPE, LOG2_E, exp2, reciprocal

_INPUT, _GRADIENT = tl.constexpr(INPUT), tl.constexpr(GRADIENT)


@triton_op("megatron_zpp_model::coded_activation", mutates_args={"maxima"})
def coded_activation(
    x: Tensor, bias: Tensor | None, factors: Tensor, maxima: Tensor, gated: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """The codes of the activation of x (R, H) by rows (R, F) and, if wanted, by columns (F, R).

    `factors` and `maxima` are those of the second map, see model/fp8/cast.py.
    """
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    by_rows, by_columns = outputs(x, rows, width, INPUT, by_rows=True, by_columns=columns)
    wrap_triton(_forward_kernel)[grid(rows, width)](
        *(x, x if bias is None else bias, factors, maxima, by_rows, by_columns, rows, width),
        GATED=gated,
        BIASED=bias is not None,
        BY_COLUMNS=columns,
        num_warps=WARPS,
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
    programs = grid(rows, width)
    biased = bias is not None
    sums = torch.empty(programs[1] if biased else 0, x.shape[1], dtype=torch.float32, device=x.device)
    wrap_triton(_backward_kernel)[programs](
        *(of_out, x, x if bias is None else bias, factors, maxima, by_rows, by_columns, sums, rows, width),
        GATED=gated,
        BIASED=biased,
        num_warps=WARPS,
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
def _row(
    x_ptr,
    by_rows_ptr,
    bias,
    bias_up,
    factor,
    row,
    column,
    height,
    width,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """What codes of every fourth row of a tile are rounded from, and magnitudes."""
    inside = (row < height)[:, None] & (column < width)[None, :]
    stride = 2 * width if GATED else width
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    gate = _load(x_ptr, bias, at, inside, float("nan"), BIASED)  # does not count for the maxima
    if GATED:
        up = _load(x_ptr + width, bias_up, at, inside, 0.0, BIASED)
        out = gate * reciprocal(1 + exp2(gate * -LOG2_E)) * up
    else:
        out = gate * reciprocal(1 + exp2(gate * (-LOG2_E * GELU_SLOPE - LOG2_E * GELU_CUBIC * (gate * gate))))
    scaled, sizes = encode(out, factor)
    out_at = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(by_rows_ptr + out_at, scaled, mask=inside)
    return scaled, sizes


@triton.jit
def _biases(bias_ptr, column, width, GATED: tl.constexpr):
    """The bias (COLUMNS) of the gate, or of all, and of the value, in fp32."""
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    bias_up = bias
    if GATED:
        bias_up = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    return bias, bias_up


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
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    group, column = tile()
    row, factor = 4 * group, tl.load(factors_ptr + 4 * _INPUT)
    bias, bias_up = _biases(bias_ptr, column, width, GATED)
    # fmt: off
    a, size_a = _row(
        x_ptr, by_rows_ptr, bias, bias_up, factor, row, column, height, width, GATED, BIASED,
    )
    b, size_b = _row(
        x_ptr, by_rows_ptr, bias, bias_up, factor, row + 1, column, height, width, GATED, BIASED,
    )
    c, size_c = _row(
        x_ptr, by_rows_ptr, bias, bias_up, factor, row + 2, column, height, width, GATED, BIASED,
    )
    d, size_d = _row(
        x_ptr, by_rows_ptr, bias, bias_up, factor, row + 3, column, height, width, GATED, BIASED,
    )
    # fmt: on
    keep_maximum(maxima_ptr, tl.maximum(tl.maximum(size_a, size_b), tl.maximum(size_c, size_d)), _INPUT)
    if BY_COLUMNS:
        store_turned(by_columns_ptr, packed(a, b, c, d, by_columns_ptr), group, column, height, width, height)


@triton.jit
def _gradient_row(
    of_out_ptr,
    x_ptr,
    by_rows_ptr,
    bias,
    bias_up,
    factor,
    row,
    column,
    height,
    width,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Of every fourth row of a tile: what codes are rounded from (twice), gradients (twice), magnitudes.

    Twice with a gate: of the gate, and of the value.
    """
    inside = (row < height)[:, None] & (column < width)[None, :]
    stride = 2 * width if GATED else width
    out_at = row.to(tl.int64)[:, None] * width + column[None, :]
    of_out = tl.load(of_out_ptr + out_at, mask=inside, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    gate = _load(x_ptr, bias, at, inside, 0.0, BIASED)
    if GATED:
        up = _load(x_ptr + width, bias_up, at, inside, 0.0, BIASED)
        share = reciprocal(1 + exp2(gate * -LOG2_E))
        of_gate = of_out * up * share * (1 + (gate - gate * share))
        of_up = of_out * gate * share
    else:
        square = gate * gate
        share = reciprocal(1 + exp2(gate * (-LOG2_E * GELU_SLOPE - LOG2_E * GELU_CUBIC * square)))
        of_gate = of_out * share * (1 + (gate - gate * share) * (GELU_SLOPE + 3 * GELU_CUBIC * square))
        of_up = of_gate
    scaled, sizes = encode(of_gate, factor)
    tl.store(by_rows_ptr + at, scaled, mask=inside)
    scaled_up = scaled
    if GATED:
        scaled_up, sizes_up = encode(of_up, factor)
        tl.store(by_rows_ptr + width + at, scaled_up, mask=inside)
        sizes = tl.maximum(sizes, sizes_up)
    return scaled, scaled_up, of_gate, of_up, sizes


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
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
):
    group, column = tile()
    row, factor = 4 * group, tl.load(factors_ptr + 4 * _GRADIENT)
    bias, bias_up = _biases(bias_ptr, column, width, GATED)
    # fmt: off
    a, a_up, total, total_up, size = _gradient_row(
        of_out_ptr, x_ptr, by_rows_ptr, bias, bias_up, factor, row, column, height, width, GATED, BIASED,
    )
    b, b_up, of_gate, of_up, size_b = _gradient_row(
        of_out_ptr, x_ptr, by_rows_ptr, bias, bias_up, factor, row + 1, column, height, width, GATED, BIASED,
    )
    total, total_up, size = total + of_gate, total_up + of_up, tl.maximum(size, size_b)
    c, c_up, of_gate, of_up, size_c = _gradient_row(
        of_out_ptr, x_ptr, by_rows_ptr, bias, bias_up, factor, row + 2, column, height, width, GATED, BIASED,
    )
    total, total_up, size = total + of_gate, total_up + of_up, tl.maximum(size, size_c)
    d, d_up, of_gate, of_up, size_d = _gradient_row(
        of_out_ptr, x_ptr, by_rows_ptr, bias, bias_up, factor, row + 3, column, height, width, GATED, BIASED,
    )
    total, total_up, size = total + of_gate, total_up + of_up, tl.maximum(size, size_d)
    # fmt: on
    stride = 2 * width if GATED else width
    sums = sums_ptr + tl.program_id(1) * stride + column
    if BIASED:
        tl.store(sums, tl.sum(total, axis=0), mask=column < width)
        if GATED:
            tl.store(sums + width, tl.sum(total_up, axis=0), mask=column < width)
    keep_maximum(maxima_ptr, size, _GRADIENT)
    store_turned(by_columns_ptr, packed(a, b, c, d, by_columns_ptr), group, column, height, width, height)
    if GATED:
        turned_ptr = by_columns_ptr + tl.full([], width, tl.int64) * height
        store_turned(
            turned_ptr, packed(a_up, b_up, c_up, d_up, by_columns_ptr), group, column, height, width, height
        )
