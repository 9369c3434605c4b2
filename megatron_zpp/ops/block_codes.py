"""Encode and decode blocks of fp32 numbers: the arithmetic of the reference."""

import torch
from torch import Tensor

from megatron_zpp.ops.formats import QuantFormat

# K blocks, B elements per block
_FACTORS = {"int8": -(2.0**-7), "int4": -(2.0**-3)}
_SMALLEST_NORMAL = 2.0**-126
_NAN_BITS = 0x7FC0  # of bf16
_FP16_MAX = 65504.0


def encode_blocks(x: Tensor, format: QuantFormat) -> tuple[Tensor, Tensor]:
    """Return codes (K, bytes) and scales (K,) of fp32 blocks x (K, B), rounded to nearest."""
    stored, usable = _block_scales(x, format)
    zero = torch.zeros_like(x[:, :1])
    inverse = torch.where(usable[:, None], stored.float().reciprocal()[:, None], zero)
    x = torch.where(usable[:, None], x, zero)
    return _to_integers(x, inverse, format.bits), stored


def decode_blocks(codes: Tensor, stored: Tensor, format: QuantFormat) -> Tensor:
    """The fp32 values (K, B) of codes (K, bytes) and scales (K,); a NaN scale makes its block NaN."""
    if format.code_type == "int8":
        numbers = codes.view(torch.int8).float()
    else:
        halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(torch.int8)
        numbers = ((halves ^ 8) - 8).float()
    return numbers * stored.float()[:, None]


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to nearest even in fp32, bf16 or fp16; finite numbers saturate in fp16, infinity does not."""
    if dtype == torch.float16:
        x = torch.where(x.isinf(), x, x.clamp(-_FP16_MAX, _FP16_MAX))
    return x.to(dtype)


def _block_scales(x: Tensor, format: QuantFormat) -> tuple[Tensor, Tensor]:
    """Stored scales (K,), and (K,) bool: whether a block has codes other than zeros."""
    finite = x.isfinite().all(1)
    magnitude = x.abs().amax(1)
    peak = torch.where((x == magnitude[:, None]).any(1), magnitude, -magnitude)
    stored = (peak * _FACTORS[format.code_type]).bfloat16()
    usable = finite & (stored.float().abs() >= _SMALLEST_NORMAL)
    # Set as bits, because the NaN that a conversion makes depends on the device.
    bits = torch.where(usable, stored, 0.0).view(torch.int16)
    return bits.masked_fill(~finite, _NAN_BITS).view(torch.bfloat16), usable


def _to_integers(x: Tensor, inverse: Tensor, bits: int) -> Tensor:
    """Return two's complement codes (K, bytes) of x (K, B) · inverse (K, 1)."""
    q = torch.round(x.double() * inverse.double())  # the product of two fp32 numbers is exact in fp64
    q = q.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8).view(torch.uint8)
    return q if bits == 8 else q[:, 0::2] & 15 | q[:, 1::2] << 4
