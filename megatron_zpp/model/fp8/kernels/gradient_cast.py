"""The cast of gradients of linear maps' outputs, with the sums that are the gradients of their biases.

Shapes: R rows, W columns of all parts together, P programs along the rows. The gradient of a map into heads
comes in three parts, which only the products join: as codes. One read makes codes in both layouts, the
largest magnitude and the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8.cast import GRADIENT
from megatron_zpp.model.fp8.kernels.cast import coded_row, grid, keep_maximum, outputs, packed, store_turned

_GROUPS, _COLUMNS, _WARPS = 32, 32, 4  # of a program: 128 rows, 32 elements a thread


def cast_gradient(
    gradient: Tensor, factors: Tensor, maxima: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a gradient (R, W) by rows (R, W) and by columns (W, R), and its sums over rows (W) fp32.

    R and W are multiples of 16; `factors` and `maxima` as in model/fp8/cast.py. Sums that are not wanted have
    no elements.
    """
    return _cast_parts(gradient.contiguous(), None, None, factors, maxima, sums)


def cast_gradients_of_heads(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, factors: Tensor, maxima: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of (R, Q), (R, K) and (R, K) side by side, W = Q + 2K."""
    return _cast_parts(of_q.contiguous(), of_k.contiguous(), of_v.contiguous(), factors, maxima, sums)


@triton_op("megatron_zpp_model::cast_gradient", mutates_args={"maxima"})
def _cast_parts(
    first: Tensor, second: Tensor | None, third: Tensor | None, factors: Tensor, maxima: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = first.shape
    others = 0 if second is None else second.shape[1]
    total = width + 2 * others
    by_rows, by_columns = outputs(first, rows, total, GRADIENT, by_rows=True, by_columns=True)
    along, down = grid(rows, max(width, others), _GROUPS, _COLUMNS)
    partial = torch.empty(down if sums else 0, total, dtype=torch.float32, device=first.device)
    # Where there are no other parts another tensor is passed, and not touched.
    wrap_triton(_cast_parts_kernel)[(along, down, 1 if second is None else 3)](
        *(first, first if second is None else second, first if third is None else third),
        *(factors, maxima, by_rows, by_columns, partial, rows, width, others),
        KIND=GRADIENT,
        JOINS=second is not None,
        SUMS=sums,
        GROUPS=_GROUPS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return by_rows, by_columns, partial.sum(0) if sums else partial.new_empty(0)


@triton.jit
def _cast_parts_kernel(
    first_ptr,  # (R, Q)
    second_ptr,  # (R, K), as is third
    third_ptr,
    factors_ptr,  # (2, 3, 4) fp32
    maxima_ptr,  # (3,) fp32
    by_rows_ptr,  # (R, W)
    by_columns_ptr,  # (W, R)
    sums_ptr,  # (P, W) fp32
    height,
    first_width,
    other_width,
    KIND: tl.constexpr,
    JOINS: tl.constexpr,
    SUMS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptr, width, before = first_ptr, first_width, 0
    if JOINS:
        part = tl.program_id(2)
        if part == 1:
            x_ptr = second_ptr
        if part == 2:
            x_ptr = third_ptr
        width = tl.where(part == 0, first_width, other_width)
        before = tl.where(part == 0, 0, first_width + (part - 1) * other_width)
    stride = first_width + 2 * other_width
    factor, row = tl.load(factors_ptr + 4 * KIND), 4 * group
    codes_ptr = by_rows_ptr + before
    FORMAT: tl.constexpr = by_rows_ptr.dtype.element_ty
    # fmt: off
    total, a, size = coded_row(x_ptr, codes_ptr, factor, row, column, height, width, stride, FORMAT, True)
    x, b, size_b = coded_row(x_ptr, codes_ptr, factor, row + 1, column, height, width, stride, FORMAT, True)
    total, size = total + x, tl.maximum(size, size_b)
    x, c, size_c = coded_row(x_ptr, codes_ptr, factor, row + 2, column, height, width, stride, FORMAT, True)
    total, size = total + x, tl.maximum(size, size_c)
    x, d, size_d = coded_row(x_ptr, codes_ptr, factor, row + 3, column, height, width, stride, FORMAT, True)
    total, size = total + x, tl.maximum(size, size_d)
    # fmt: on
    if SUMS:
        place = sums_ptr + tl.program_id(1) * stride + before + column
        tl.store(place, tl.sum(total, axis=0), mask=column < width)
    keep_maximum(maxima_ptr, size, KIND)
    turned_ptr = by_columns_ptr + before * tl.full([], height, tl.int64)
    store_turned(turned_ptr, packed(a, b, c, d, FORMAT), group, column, height, width)
