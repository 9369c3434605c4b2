"""Lloyd-Max codes of 2 and 4 bits: levels, boundaries, block statistics, packing and the message format.

The levels minimise the mean squared error for the unit normal distribution (Max, Quantizing for Minimum
Distortion, 1960, table I; Lloyd, Least Squares Quantization in PCM, 1982). They are the fp32 numbers nearest
to the solution, which tests/ops/test_lloyd_max.py computes again; Max prints four digits of it. No level is
zero, so code and scale cannot say "zero": a block of zeros has scale 0.

Every fp32 operation here is rounded on its own, products and sums included, so that kernels without
contraction to fused multiply-adds give the same bits. K blocks, B elements in a block, n = K · B elements.
"""

import torch
from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat

SMALLEST_NORMAL = 2.0**-126
BF16_NAN = 0x7FC0  # as bits: which NaN a conversion makes depends on the device
_EXPONENT = 0x7F800000

# By bits: the positive levels, and the boundaries between them; the negative ones mirror them around 0.
LEVELS = {
    2: (0.45278004, 1.5104176),
    4: (0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895),
}
BOUNDARIES = {
    2: (0.9815988,),
    4: (0.25822166, 0.5224037, 0.79954976, 1.0992858, 1.4371388, 1.8435318, 2.4008033),
}


def ordered_sum(x: Tensor) -> Tensor:
    """The sums (K,) of fp32 blocks (K, B) in a fixed order.

    Each 8 neighbours are added in turn; of n such sums i and i + n / 2, then i and i + n / 4, and so on.
    """
    parts = x.reshape(len(x), -1, 8)
    total = parts[:, :, 0]
    for i in range(1, 8):
        total = total + parts[:, :, i]
    while total.shape[1] > 1:
        low, high = total.chunk(2, dim=1)
        total = low + high
    return total[:, 0]


def normalised(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp32 blocks x (K, B) as z (K, B) and powers of two (K,), whether (K,) each is finite and not zero.

    x = z · power, exactly where z is not subnormal. The largest |z| of a block is in [1, 2), so squares
    neither overflow nor vanish. A block whose largest magnitude is below 2^-126 counts as zeros. z is 0 where
    a block is zero or not finite.
    """
    largest = x.abs().amax(1)  # NaN where the block has one
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST_NORMAL)
    power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32).where(usable, 1.0)
    z = torch.where(usable[:, None], x * power.reciprocal()[:, None], 0.0)
    return z, power, finite, usable


def stored_scales(scales: Tensor, finite: Tensor, usable: Tensor) -> Tensor:
    """fp32 scales (K,) as bf16, nearest even: 0 for blocks of zeros, and NaN for blocks that are not finite.

    A scale below the smallest normal number is 0, and one that overflows bf16 is NaN.
    """
    rounded = scales.to(torch.bfloat16)
    usable = usable & (rounded.float() >= SMALLEST_NORMAL)
    bits = torch.where(usable, rounded.view(torch.int16), torch.zeros_like(rounded).view(torch.int16))
    return bits.masked_fill(~finite | (usable & rounded.isinf()), BF16_NAN).view(torch.bfloat16)


def nearest_codes(x: Tensor, unit: Tensor, bits: int) -> Tensor:
    """Codes (K, B) uint8 of the fp32 blocks x (K, B) in multiples of unit (K,), from the lowest level up.

    |x| is compared with the fp32 products of boundaries and unit. On a boundary the outer level is taken; a
    zero of either sign has the smallest positive level.
    """
    magnitude = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    size = x.abs()
    for boundary in BOUNDARIES[bits]:
        magnitude += (size >= (unit * boundary)[:, None]).view(torch.uint8)
    half = 1 << (bits - 1)
    return torch.where(x < 0, half - 1 - magnitude, half + magnitude)


def coded(codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (K, B) and scales (K,) as they are sent: codes are 0 in blocks whose scale is 0 or NaN."""
    return codes.masked_fill(~(stored > 0)[:, None], 0), stored


def levels_of(codes: Tensor, bits: int) -> Tensor:
    """The fp32 levels of codes, in their shape."""
    positive = torch.tensor(LEVELS[bits], device=codes.device)
    return torch.cat((-positive.flip(0), positive))[codes.int()]


def decoded(codes: Tensor, stored: Tensor, bits: int) -> Tensor:
    """The fp32 values (K, B) of codes (K, B) with bf16 scales (K,): one product each."""
    return levels_of(codes, bits) * stored.float()[:, None]


def write_message(message: Tensor, codes: Tensor, stored: Tensor, format: LloydMaxFormat) -> None:
    """Fill `message` (message_bytes(n),) uint8 from codes (K, B) and scales (K,)."""
    packed, scales, padding = format.parts_of(message, codes.numel())
    packed.copy_(pack(codes, format.bits).view_as(packed))
    scales.copy_(stored.view(torch.uint8).view_as(scales))
    padding.zero_()


def read_message(message: Tensor, numel: int, format: LloydMaxFormat) -> tuple[Tensor, Tensor]:
    """The inverse of `write_message`: codes (K, B) uint8 and scales (K,) bf16."""
    packed, scales, _ = format.parts_of(message, numel)
    stored = scales.flatten().clone().view(torch.bfloat16)
    return unpack(packed, format.bits).view(-1, format.block), stored


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (any shape) of 2 or 4 bits as bytes; the first element has the lowest bits of a byte."""
    per_byte = 8 // bits
    columns = codes.reshape(-1, per_byte)
    packed = columns[:, 0].clone()
    for index in range(1, per_byte):
        packed |= columns[:, index] << (index * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`, flat."""
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten()
