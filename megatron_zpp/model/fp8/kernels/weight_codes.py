"""Products of codes with weights, by kernels: also with those that are held as codes (model/fp8/weights.py).

Shapes: n numbers, N outputs, K inputs. A program encodes consecutive numbers of a part of a weight;
model/fp8/kernels/cast.py has the kernels that cast and transpose.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from megatron_zpp.model.fp8.cast import GRADIENT, INPUT, WEIGHT, back
from megatron_zpp.model.fp8.delayed import multiply
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


def product(
    codes: Tensor, weight: Tensor, held: Tensor | None, factors: Tensor, maxima: Tensor, dtype: torch.dtype
) -> Tensor:
    """Codes (R, K) times a weight (N, K), which may be `held` as codes: (R, N)."""
    rows = held
    if rows is None:
        rows, _ = cast(weight, factors, maxima, WEIGHT, rows=True, columns=False)
    return multiply(codes, rows.t(), back(factors, INPUT), back(factors, WEIGHT), dtype, fast=True)


def input_gradient(
    codes: Tensor, weight: Tensor, held: Tensor | None, factors: Tensor, maxima: Tensor, dtype: torch.dtype
) -> Tensor:
    """From codes of the gradient of the product (R, N): (R, K)."""
    if held is None:
        _, columns = cast(weight, factors, maxima, WEIGHT, rows=False, columns=True)
    else:
        columns = transpose(held, codes)
    return multiply(codes, columns.t(), back(factors, GRADIENT), back(factors, WEIGHT), dtype)


def weight_gradient(turned: Tensor, columns: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """From codes of the gradient of the product (N, R) and of the input (K, R), by columns: (N, K)."""
    return multiply(turned, columns.t(), back(factors, GRADIENT), back(factors, INPUT), dtype)


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
