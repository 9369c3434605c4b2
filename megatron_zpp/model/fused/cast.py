"""model/fp8_cast.py's cast in one pass: codes in both layouts and the largest magnitude from one read.

Shapes: R rows, W columns. A program has a tile of both layouts. Largest magnitudes are joined by atomic
maxima, whose order does not matter.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8_cast import FORMATS, LARGEST

_ROWS, _COLUMNS, _WARPS = 64, 128, 8  # of a program: 32 elements a thread


def cast(
    x: Tensor, factors: Tensor, maxima: Tensor, kind: int, *, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """See model/fp8_cast.plain_cast; x is contiguous."""
    return _cast(x, factors, maxima, kind, rows, columns)


def outputs(x: Tensor, rows: int, width: int, kind: int, *, by_rows: bool, by_columns: bool) -> tuple:
    """Memory for codes (R, W) and (W, R) of a kind, or without elements."""
    return (
        x.new_empty((rows, width) if by_rows else 0, dtype=FORMATS[kind]),
        x.new_empty((width, rows) if by_columns else 0, dtype=FORMATS[kind]),
    )


@triton_op("megatron_zpp_model::cast_fp8", mutates_args={"maxima"})
def _cast(
    x: Tensor, factors: Tensor, maxima: Tensor, kind: int, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    height, width = x.shape
    by_rows, by_columns = outputs(x, height, width, kind, by_rows=rows, by_columns=columns)
    wrap_triton(_cast_kernel)[(triton.cdiv(width, _COLUMNS), triton.cdiv(height, _ROWS))](
        *(x, factors, maxima, by_rows, by_columns, height, width),
        KIND=kind,
        LARGEST=LARGEST[kind],
        BY_ROWS=rows,
        BY_COLUMNS=columns,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return by_rows, by_columns


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """Codes of fp32 numbers, to nearest, ties to even."""
    return x.to(FORMAT)


@triton.jit
def encode(x, factor, LARGEST: tl.constexpr):
    """fp32 numbers that codes of the largest code `LARGEST` are rounded from, and their magnitudes.

    A NaN or Inf becomes a NaN, whose magnitude is 0.
    """
    size = tl.abs(x)
    finite = size < float("inf")  # false for NaN
    scaled = tl.minimum(tl.maximum(x * factor, -LARGEST), LARGEST)
    return tl.where(finite, scaled, float("nan")), tl.where(finite, size, 0.0)


@triton.jit
def keep_maximum(maxima_ptr, sizes, KIND: tl.constexpr):
    """Let `maxima[KIND]` be no less than any of `sizes`, which are at least 0 and compare like integers."""
    place = (maxima_ptr + KIND).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(place, tl.max(tl.max(sizes, axis=1), axis=0).to(tl.int32, bitcast=True))


@triton.jit
def store_codes(
    by_rows_ptr,  # (R, stride)
    by_columns_ptr,  # (W, height)
    scaled,  # (ROWS, COLUMNS) fp32, from `encode`
    row,
    column,
    inside,
    height,
    stride,
    BY_ROWS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    """Round a tile to codes, and write them in the layouts that are wanted."""
    codes = rounded(scaled, by_rows_ptr.dtype.element_ty)
    if BY_ROWS:
        tl.store(by_rows_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], codes, mask=inside)
    if BY_COLUMNS:
        at = column.to(tl.int64)[:, None] * height + row[None, :]
        tl.store(by_columns_ptr + at, tl.trans(codes), mask=tl.trans(inside))


@triton.jit
def _cast_kernel(
    x_ptr,  # (R, W)
    factors_ptr,  # (2, 3, 4) fp32
    maxima_ptr,  # (3,) fp32
    by_rows_ptr,  # (R, W)
    by_columns_ptr,  # (W, R)
    height,
    width,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < height)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scaled, sizes = encode(x, tl.load(factors_ptr + 4 * KIND), LARGEST)
    keep_maximum(maxima_ptr, sizes, KIND)
    store_codes(by_rows_ptr, by_columns_ptr, scaled, row, column, inside, height, width, BY_ROWS, BY_COLUMNS)
