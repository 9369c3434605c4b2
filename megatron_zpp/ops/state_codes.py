"""The forms of AdamW's states that take fewer bytes than fp32, in plain torch: the oracle of its kernel.

Blocks of 128 elements share a scale, a power of two. A code is a floating-point number times that scale,
whose largest exponent is that of the block's peak: of the first moment, or of the root of the second one,
since a root needs half the range. bf16 has no scale and holds the second moment itself.

    form  first moment                              second moment                    bytes of both
    bf16  bf16                                      bf16                             4
    fp16  fp16                                      root in fp16                     4 + 2 / 128
    fp8   sign, 4 bits of exponent, 3 of mantissa   root: 4 and 4 bits               2 + 2 / 128

A block of fp8 holds first moments down to 2^-17 of its peak and roots down to 2^-18, one of fp16 both down
to 2^-39; smaller ones round to 0 or the smallest. A second moment above 0 never becomes 0, because its root
divides. Infinities become the largest number. A NaN makes its block NaN. Numbers are rounded up with the
probability of their distance from the one below; draws are those of a counter. Decoding and encoding again
changes no bit, so a run that resumes from decoded states continues bit for bit.

Weights `bf16+8` are the upper 24 bits of fp32: bf16, rounded to nearest, and a byte of correction.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_zpp.ops.signs import philox

Form = Literal["fp32", "fp16", "bf16", "fp8"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
FORMS: dict[torch.dtype, Form] = {dtype: form for form, dtype in DTYPES.items()}  # type: ignore[misc]
STATE_BLOCK = 128
SEED = 0x5EED_0F_AD
NEAREST = 2048  # the draw that rounds to the nearest number
NEAREST_WEIGHT = 128  # that of a weight
_NAN_SCALE = 255
_INFINITY, _NAN = 0x7F800000, 0x7FC00000

# n elements, K blocks of them. Bits are int64, of which a conversion to shorter integers keeps the low ones.


class Draws(NamedTuple):
    """Random integers of n elements: 12 bits for each moment, 8 for the weight, in the order of use."""

    first: Tensor
    second: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Rounding:
    """The counter of the random bits of a run of elements, which no sharding changes.

    `first` is the number of the first element inside its unit, a multiple of 128. `step` () fp32 is on the
    device of the states.
    """

    step: Tensor
    unit: int
    first: int = 0
    seed: int = SEED

    def packed(self) -> tuple[Tensor, int, int, int]:
        """As operators take them."""
        return self.step, self.seed, self.unit, self.first


def draws_of(rounding: Rounding, elements: slice) -> Draws:
    """The draws of some elements of the run, whole blocks."""
    begin, end = (rounding.first + at for at in (elements.start, elements.stop))
    quads = torch.arange(begin // 4, end // 4, device=rounding.step.device)
    unit, step = torch.full_like(quads, rounding.unit), rounding.step.long().expand_as(quads)
    key = rounding.seed & 0xFFFFFFFF, rounding.seed >> 32
    words = torch.stack(philox((quads & 0xFFFFFFFF, quads >> 32, unit, step), key), dim=1).flatten()
    return Draws(words & 0xFFF, words >> 12 & 0xFFF, words >> 24)


@dataclass(frozen=True)
class _Grid:
    """Floating-point numbers from 0 on, subnormal ones included; `Grid` of csrc/state_codes.h."""

    exponent: int  # bits
    mantissa: int  # bits
    top: int  # the largest exponent
    smallest: int  # exponents of peaks, in fp32's bits, beyond which the scale stays the same
    largest: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    def scales(self, magnitudes: Tensor) -> Tensor:
        """Exponents + 127 (K,) of blocks (K, 128) of magnitudes; 255 with a NaN."""
        peaks = magnitudes.nan_to_num(nan=0.0, posinf=torch.inf).amax(1)
        exponents = (_bits(peaks) >> 23).clamp(self.smallest, self.largest) - (self.top - self.bias)
        return torch.where(magnitudes.isnan().any(1), _NAN_SCALE, exponents)

    def codes(self, magnitudes: Tensor, scales: Tensor, draws: Tensor) -> Tensor:
        """Codes (K, 128) of magnitudes with scales (K,); of infinities the largest."""
        # Then fp32's exponents are the grid's, and fp32's subnormal numbers are the grid's with more bits.
        z = (magnitudes * _power(254 - scales)[:, None]) * 2.0 ** (self.bias - 127)
        dropped = 23 - self.mantissa
        codes = _bits(z) + (2 * draws + 1 << dropped - 13) >> dropped
        return codes.clamp(max=((self.top + 1) << self.mantissa) - 1)

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The magnitudes (K, 128) fp32 of codes with scales (K,); NaN where the scale is 255."""
        y = _floats(codes.long() << (23 - self.mantissa)) * 2.0 ** (127 - self.bias)
        return y * torch.where(scales == _NAN_SCALE, torch.nan, _power(scales))[:, None]


_FIRST = {"fp16": _Grid(5, 10, 30, 32, 254), "fp8": _Grid(4, 3, 15, 32, 254)}
_SECOND = {"fp16": _Grid(5, 10, 30, 104, 190), "fp8": _Grid(4, 4, 15, 84, 190)}  # finite when squared


def is_scaled(form: str) -> bool:
    """Whether blocks of a form have scales."""
    return form in _FIRST


def zeros(numel: int, form: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Moments of 0: values (numel,) in a form, and their scales if it has some, for whole blocks."""
    values = torch.zeros(numel, dtype=DTYPES[form], device=device)
    count = -(-numel // STATE_BLOCK)
    return values, torch.zeros(count, dtype=torch.uint8, device=device) if is_scaled(form) else None


def encode(
    x: Tensor, form: Form, *, second: bool, draws: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Moments (n,) fp32 as values (n,) of `form` and their scales (n / 128,).

    Without draws they are rounded to nearest. `second`: of the second moment. n must be whole blocks for a
    form with scales.
    """
    if form == "fp32":
        return x, None
    if draws is None:
        draws = torch.full_like(x, NEAREST, dtype=torch.int64)
    if form == "bf16":
        return _rounded_bf16(x, draws), None
    blocks, draws = x.view(-1, STATE_BLOCK), draws.view(-1, STATE_BLOCK)
    grid = (_SECOND if second else _FIRST)[form]
    magnitudes = blocks.double().sqrt().float() if second else blocks.abs()
    scales = grid.scales(magnitudes)
    codes = grid.codes(magnitudes.nan_to_num(nan=0.0, posinf=torch.inf), scales, draws)
    if second:
        codes = torch.maximum(codes, (magnitudes > 0).long())
    else:
        codes = codes | (blocks.signbit().long() << (grid.exponent + grid.mantissa))
    codes = codes.masked_fill((scales == _NAN_SCALE)[:, None], 0).flatten()
    values = codes.to(torch.uint8) if form == "fp8" else codes.to(torch.int16).view(torch.float16)
    return values, scales.to(torch.uint8)


def decode(values: Tensor, scales: Tensor | None, *, second: bool) -> Tensor:
    """The moments (n,) fp32 of `encode`, whose form the dtype of `values` says."""
    if scales is None:
        return values.float()
    form = FORMS[values.dtype]
    grid = (_SECOND if second else _FIRST)[form]
    bits = values if form == "fp8" else values.view(torch.int16)
    codes = (bits.long() & (0xFF if form == "fp8" else 0xFFFF)).view(-1, STATE_BLOCK)
    if second:
        roots = grid.values(codes, scales.long())
        return (roots * roots).flatten()
    sign = grid.exponent + grid.mantissa
    magnitudes = grid.values(codes & ((1 << sign) - 1), scales.long())
    return torch.where(codes >> sign == 1, -magnitudes, magnitudes).flatten()


def split_weights(weights: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights (n,) fp32 as bf16 and corrections, bytes; rounded to 24 bits, to nearest without draws."""
    added: Tensor | int = NEAREST_WEIGHT if draws is None else draws
    bits = torch.where(weights.isnan(), _NAN, _bits(weights) + added)
    upper = bits >> 8 & 0xFFFFFF
    return (upper + 0x80 >> 8).to(torch.int16).view(torch.bfloat16), (upper & 0xFF).to(torch.uint8)


def joined_weights(upper: Tensor, corrections: Tensor) -> Tensor:
    """The weights (n,) fp32 of `split_weights`."""
    high = upper.view(torch.int16).to(torch.int32).sub_(corrections >> 7).bitwise_left_shift_(16)
    return high.bitwise_or_(corrections.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def _rounded_bf16(x: Tensor, draws: Tensor) -> Tensor:
    magnitudes = _bits(x) & 0x7FFFFFFF
    rounded = (magnitudes + (2 * draws + 1 << 3) >> 16).clamp(max=0x7F7F)
    rounded = torch.where(magnitudes < _INFINITY, rounded, 0x7F80)
    rounded = torch.where(magnitudes > _INFINITY, 0x7FC0, rounded)
    return (rounded | x.signbit().long() << 15).to(torch.int16).view(torch.bfloat16)


def _bits(x: Tensor) -> Tensor:
    """The bits of fp32 numbers as int64 from 0 on."""
    return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _floats(bits: Tensor) -> Tensor:
    """The fp32 numbers of bits below 2^32."""
    return bits.to(torch.int32).view(torch.float32)


def _power(exponents: Tensor) -> Tensor:
    """2^(exponent - 127) for exponents from 0 to 255, where 0 stands for 0."""
    return _floats(exponents.clamp(min=0) << 23)
