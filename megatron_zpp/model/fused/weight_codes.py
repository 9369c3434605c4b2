"""Kernels for weights that are held as codes (model/fp8_weights.py): encode a part of one, transpose one.

Shapes: n numbers, N outputs, K inputs. A program encodes consecutive numbers, or has a tile of both layouts.
Transposed codes are moved as bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from megatron_zpp.model.fp8_cast import LARGEST, WEIGHT
from megatron_zpp.model.fused.cast import encode, keep_maximum, store_codes

_ROWS, _WIDTH, _WARPS = 64, 128, 8  # of a program that encodes: 32 numbers a thread
_TILE, _TILE_WARPS = 128, 8  # of a program that transposes: 64 bytes a thread


def encode_weights(numbers: Tensor, codes: Tensor, factors: Tensor, maxima: Tensor) -> None:
    """See model/fp8_weights.plain_encode; both are contiguous."""
    count = numbers.numel()
    _encode_kernel[(triton.cdiv(count, _ROWS * _WIDTH),)](
        *(numbers, factors, maxima, codes, count),
        KIND=WEIGHT,
        LARGEST=LARGEST[WEIGHT],
        ROWS=_ROWS,
        WIDTH=_WIDTH,
        num_warps=_WARPS,
    )


def transpose(codes: Tensor, after: Tensor) -> Tensor:
    """See model/fp8_delayed.plain_transpose."""
    return _transpose(codes.view(torch.uint8), after).view(codes.dtype)


@custom_op(
    "megatron_zpp_model::transpose_fp8", mutates_args=()
)  # with triton_op compilers would drop `after`
def _transpose(codes: Tensor, after: Tensor) -> Tensor:
    height, width = codes.shape
    turned = codes.new_empty(width, height)
    _transpose_kernel[(triton.cdiv(width, _TILE), triton.cdiv(height, _TILE))](
        *(codes, turned, height, width), TILE=_TILE, num_warps=_TILE_WARPS
    )
    return turned


@_transpose.register_fake
def _(codes: Tensor, after: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


@triton.jit
def _encode_kernel(
    numbers_ptr,  # (n,) fp32
    factors_ptr,  # (2, 3, 4) fp32
    maxima_ptr,  # (3,) fp32
    codes_ptr,  # (n,)
    count,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * WIDTH + column[None, :]
    inside = at < count
    numbers = tl.load(numbers_ptr + at, mask=inside, other=0.0)
    scaled, sizes = encode(numbers, tl.load(factors_ptr + 4 * KIND), LARGEST)
    keep_maximum(maxima_ptr, sizes, KIND)
    store_codes(codes_ptr, codes_ptr, scaled, row, column, inside, 0, WIDTH, True, False)


@triton.jit
def _transpose_kernel(
    codes_ptr,  # (N, K) bytes
    turned_ptr,  # (K, N) bytes
    height,
    width,
    TILE: tl.constexpr,
):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < height)[:, None] & (column < width)[None, :]
    codes = tl.load(codes_ptr + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0)
    at = column.to(tl.int64)[:, None] * height + row[None, :]
    tl.store(turned_ptr + at, tl.trans(codes), mask=tl.trans(inside))
