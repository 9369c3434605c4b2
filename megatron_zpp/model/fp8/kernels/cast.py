"""model/fp8/cast.py's cast in one pass: codes in both layouts and the largest magnitude from one read.

Of gradients of linear maps' outputs also the sums that are the gradients of their biases. The gradient of a
map into heads comes in three parts, which only the products join: as codes.

Shapes: R rows, W columns of all parts together, P programs along the rows. A program has a tile of both
layouts. What is stored is rounded to codes, to nearest, ties to even; what is too large becomes the largest
code. Codes are turned in words of four rows, since to turn bytes one by one takes longer than to write
them. Largest magnitudes are joined by atomic maxima, whose order does not matter.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fp8.cast import FORMATS, GRADIENT

_GROUPS, _COLUMNS, WARPS = 16, 64, 4  # of a program: 64 rows, 32 elements a thread and input
# Without line ends, which torch 2.11 does not escape where it writes constants into a graph's text.
_E4M3_WORDS, _E5M2_WORDS = (
    tl.constexpr(
        "{.reg .b16 low, high; "
        f"cvt.rn.satfinite.{codes}x2.f32 low, $2, $1; "
        f"cvt.rn.satfinite.{codes}x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high};}"
    )
    for codes in ("e4m3", "e5m2")
)
_TILE_GROUPS, _TILE_COLUMNS = tl.constexpr(_GROUPS), tl.constexpr(_COLUMNS)
_SUMMED_GROUPS, _SUMMED_COLUMNS = 32, 32  # the same with sums: 128 rows


def cast(
    x: Tensor, factors: Tensor, maxima: Tensor, kind: int, *, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """See model/fp8/cast.plain_cast; x is contiguous."""
    by_rows, by_columns, _ = _cast(x, None, None, factors, maxima, kind, rows, columns, False)
    return by_rows, by_columns


def cast_gradients(
    parts: Sequence[Tensor], factors: Tensor, maxima: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a gradient by rows (R, W) and by columns (W, R), and its sums over rows (W) fp32.

    Its `parts` are one, or (R, Q), (R, K) and (R, K) side by side, W = Q + 2K. R and W are multiples of 16;
    `factors` and `maxima` as in model/fp8/cast.py. Sums that are not wanted have no elements.
    """
    first, *others = [part.contiguous() for part in parts]
    second, third = others or (None, None)
    return _cast(first, second, third, factors, maxima, GRADIENT, True, True, sums)


def outputs(x: Tensor, rows: int, width: int, kind: int, *, by_rows: bool, by_columns: bool) -> tuple:
    """Memory for codes (R, W) and (W, R) of a kind, or without elements."""
    return (
        x.new_empty((rows, width) if by_rows else 0, dtype=FORMATS[kind]),
        x.new_empty((width, rows) if by_columns else 0, dtype=FORMATS[kind]),
    )


@triton_op("megatron_zpp_model::cast_fp8", mutates_args={"maxima"})
def _cast(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    factors: Tensor,
    maxima: Tensor,
    kind: int,
    rows: bool,
    columns: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    height, width = first.shape
    others = 0 if second is None else second.shape[1]
    total = width + 2 * others
    by_rows, by_columns = outputs(first, height, total, kind, by_rows=rows, by_columns=columns)
    tile = (_SUMMED_GROUPS, _SUMMED_COLUMNS) if sums else (_GROUPS, _COLUMNS)
    along, down = grid(height, max(width, others), *tile)
    partial = torch.empty(down if sums else 0, total, dtype=torch.float32, device=first.device)
    # Where there are no other parts another tensor is passed, and not touched.
    wrap_triton(_cast_kernel)[(along, down, 1 if second is None else 3)](
        *(first, first if second is None else second, first if third is None else third),
        *(factors, maxima, by_rows, by_columns, partial, height, width, others),
        KIND=kind,
        JOINS=second is not None,
        BY_ROWS=rows,
        BY_COLUMNS=columns,
        SUMS=sums,
        GROUPS=tile[0],
        COLUMNS=tile[1],
        num_warps=WARPS,
    )
    return by_rows, by_columns, partial.sum(0) if sums else partial.new_empty(0)


def grid(rows: int, width: int, groups: int = _GROUPS, columns: int = _COLUMNS) -> tuple[int, int]:
    """How many programs there are for rows in groups of four."""
    return triton.cdiv(width, columns), triton.cdiv(rows, 4 * groups)


def turn(codes: Tensor, turned: Tensor) -> None:
    """Write codes (R, W) column by column (W, R); a part of operations of Triton, not an operation."""
    height, width = codes.shape
    wrap_triton(_turn_kernel)[grid(height, width)](
        codes.view(torch.uint8),
        turned.view(torch.uint8),
        height,
        width,
        num_warps=WARPS,
    )


@triton.jit
def tile():
    """Groups of four rows, and columns, of a program."""
    group = tl.program_id(1) * _TILE_GROUPS + tl.arange(0, _TILE_GROUPS)
    return group, tl.program_id(0) * _TILE_COLUMNS + tl.arange(0, _TILE_COLUMNS)


@triton.jit
def encode(x, factor):
    """fp32 numbers that codes are rounded from, and their magnitudes. A NaN or Inf becomes NaN in both."""
    finite = x * 0.0 + x  # one instruction; a comparison and selections took five
    return finite * factor, tl.abs(finite)


@triton.jit
def keep_maximum(maxima_ptr, sizes, KIND: tl.constexpr):
    """Let `maxima[KIND]` be no less than any of `sizes`, magnitudes (or NaN, which do not count).

    Magnitudes compare like integers. Few programs have something to write: what they read may be old, and is
    never too large.
    """
    place = (maxima_ptr + KIND).to(tl.pointer_type(tl.int32), bitcast=True)
    largest = tl.maximum(tl.max(tl.ravel(sizes), axis=0), 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(place, largest, mask=largest > tl.load(place))


@triton.jit
def packed(first, second, third, fourth, codes_ptr):
    """Words of 32 bits with the codes of fp32 numbers in four rows, the first in the lowest byte.

    Rounded here again, after the codes by rows: ptxas 12.8 loses codes that are taken out of a pair.
    """
    e5m2: tl.constexpr = tl.float8e5 == codes_ptr.dtype.element_ty
    return tl.inline_asm_elementwise(
        _E5M2_WORDS if e5m2 else _E4M3_WORDS,
        "=r,f,f,f,f",
        [first, second, third, fourth],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_turned(
    by_columns_ptr,  # W rows of R codes, `stride` apart: R, or more where they are a part of a larger tensor
    words,  # (GROUPS, COLUMNS) of the codes of four rows
    group,
    column,
    height,  # a multiple of 4, as is stride
    width,
    stride,
):
    """Write a tile column by column."""
    place = by_columns_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    at = column.to(tl.int64)[:, None] * (stride // 4) + group[None, :]
    inside = (column < width)[:, None] & (group < height // 4)[None, :]
    tl.store(place + at, tl.trans(words), mask=inside)


@triton.jit
def coded_row(
    x_ptr,  # (R, W)
    by_rows_ptr,  # R rows of W codes, `stride` apart
    factor,
    row,
    column,
    height,
    width,
    stride,
    BY_ROWS: tl.constexpr,
):
    """Every fourth row of a tile: the numbers, what their codes are rounded from, and magnitudes."""
    inside = (row < height)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scaled, sizes = encode(x, factor)
    if BY_ROWS:
        tl.store(by_rows_ptr + at * stride + column[None, :], scaled, mask=inside)
    return x, scaled, sizes


@triton.jit
def _cast_kernel(
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
    BY_ROWS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
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
    out_ptr = by_rows_ptr + before
    # fmt: off
    total, a, size = coded_row(x_ptr, out_ptr, factor, row, column, height, width, stride, BY_ROWS)
    x, b, size_b = coded_row(x_ptr, out_ptr, factor, row + 1, column, height, width, stride, BY_ROWS)
    total, size = total + x, tl.maximum(size, size_b)
    x, c, size_c = coded_row(x_ptr, out_ptr, factor, row + 2, column, height, width, stride, BY_ROWS)
    total, size = total + x, tl.maximum(size, size_c)
    x, d, size_d = coded_row(x_ptr, out_ptr, factor, row + 3, column, height, width, stride, BY_ROWS)
    total, size = total + x, tl.maximum(size, size_d)
    # fmt: on
    if SUMS:
        place = sums_ptr + tl.program_id(1) * stride + before + column
        tl.store(place, tl.sum(total, axis=0), mask=column < width)
    keep_maximum(maxima_ptr, size, KIND)
    if BY_COLUMNS:
        turned_ptr = by_columns_ptr + before * tl.full([], height, tl.int64)
        store_turned(turned_ptr, packed(a, b, c, d, by_columns_ptr), group, column, height, width, height)


@triton.jit
def _turn_kernel(
    by_rows_ptr,  # (R, W) bytes
    by_columns_ptr,  # (W, R) bytes
    height,
    width,
):
    group, column = tile()
    words = tl.zeros([_TILE_GROUPS, _TILE_COLUMNS], tl.int32)
    for place in tl.static_range(4):
        row = 4 * group + place
        inside = (row < height)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        words |= tl.load(by_rows_ptr + at, mask=inside, other=0).to(tl.int32) << (8 * place)
    store_turned(by_columns_ptr, words, group, column, height, width, height)
