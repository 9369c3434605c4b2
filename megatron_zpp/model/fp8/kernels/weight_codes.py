"""Codes of weights in both layouts, by kernels: of those that are held as codes (model/fp8/weights.py) too.

Shapes: n numbers, N outputs, K inputs. A program encodes consecutive numbers of a part of a weight;
model/fp8/kernels/cast.py has the kernels that cast and transpose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from megatron_zpp.model.fp8.cast import WEIGHT
from megatron_zpp.model.fp8.kernels.cast import (
    WARPS,
    _turn_kernel,
    cast,
    encode,
    grid,
    keep_maximum,
)

_NUMBERS = 4096  # of a program that encodes: 32 numbers a thread
_KIND, _COUNT = tl.constexpr(WEIGHT), tl.constexpr(_NUMBERS)


def encode_weights(numbers: Tensor, codes: Tensor, factors: Tensor, maxima: Tensor) -> None:
    """See model/fp8/weights.plain_encode; both are contiguous."""
    count = numbers.numel()
    _encode_kernel[(triton.cdiv(count, _NUMBERS),)](
        *(numbers, factors, maxima, codes, count),
        num_warps=WARPS,
    )


def weight_by_rows(weight: Tensor, held: Tensor | None, factors: Tensor, maxima: Tensor) -> Tensor:
    """The codes (N, K) of a weight (N, K), which may be `held` as such."""
    if held is not None:
        return held
    codes, _ = cast(weight, factors, maxima, WEIGHT, rows=True, columns=False)
    return codes


def weight_by_columns(
    weight: Tensor, held: Tensor | None, factors: Tensor, maxima: Tensor, *, after: Tensor
) -> Tensor:
    """The same column by column, (K, N); `after` as in plain_transpose."""
    if held is not None:
        return transpose(held, after)
    _, codes = cast(weight, factors, maxima, WEIGHT, rows=False, columns=True)
    return codes


def transpose(codes: Tensor, after: Tensor) -> Tensor:
    """See model/fp8/delayed.plain_transpose."""
    return _transpose(codes.view(torch.uint8), after).view(codes.dtype)


@custom_op("megatron_zpp_model::transpose_fp8", mutates_args=())  # compilers drop `after` of a triton_op
def _transpose(codes: Tensor, after: Tensor) -> Tensor:
    height, width = codes.shape
    turned = codes.new_empty(width, height)
    _turn_kernel[grid(height, width)](codes, turned, height, width, num_warps=WARPS)
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
):
    at = tl.program_id(0).to(tl.int64) * _COUNT + tl.arange(0, _COUNT)
    inside = at < count
    numbers = tl.load(numbers_ptr + at, mask=inside, other=0.0)
    scaled, sizes = encode(numbers, tl.load(factors_ptr + 4 * _KIND))
    keep_maximum(maxima_ptr, sizes, _KIND)
    tl.store(codes_ptr + at, scaled, mask=inside)
