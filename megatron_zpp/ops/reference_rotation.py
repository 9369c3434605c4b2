"""Rotated gradients in plain torch: the oracle of rotate-and-encode and of the sum of rotated codes.

y = H · D · x / sqrt(R): D is a diagonal of random signs, equal on all senders of a sum, and H the Hadamard
matrix of R = min(B, 256) elements, which spreads an outlier over all of them. Per run of R elements, with
every operation rounded to fp32 on its own:

    x · D                       exact
    butterflies                 for h = 1, 2, 4 … R / 2: elements i (bit h clear) and i + h become their sum
                                and their difference
    · 1 / sqrt(R)               one product; exact for R = 256
    q: the level nearest y / rms(y) of the block of B elements; |y| against boundary · rms in fp32
    s = bf16(power · (sum(z²) / sum(z · level[q])))     y = z · power (`lloyd_max.normalised`)

The scale is ‖y‖² / ⟨y, c⟩, with which a decoded block is nearly unbiased over the signs (DRIVE, 2105.08339,
section 4; EDEN, 2108.08842, section 3). Sums run in `lloyd_max.ordered_sum`'s order. A block of zeros has
scale 0. A block with a NaN, an Inf or a butterfly that overflows has a NaN scale and arrives as NaN.

The receiver decodes, sums in the order of the senders, applies the butterflies, and then D:
once for all senders. H and D mix the elements of a run, so gaps between parameters are zeroed afterwards.

With error feedback x is the fp32 sum of the input and of what codes lost before times the divisor, and
(y - level[q] · s) is rotated back, times 1 / divisor in fp32, and rounded to bf16: what the codes lose of x.

Signs are bits of Philox4x32-7 with the key `seed` and the counter (e // 128, low and high 32 bits; unit;
iteration): the sign of element e of a unit is negative where bit e % 32 of word e % 128 // 32 is set.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.lloyd_max import (
    coded,
    decoded,
    levels_of,
    nearest_codes,
    normalised,
    ordered_sum,
    read_message,
    stored_scales,
    write_message,
)
from megatron_zpp.ops.reference import tiles
from megatron_zpp.ops.reference_difference import root_mean_square
from megatron_zpp.ops.signs import philox

SIGNS_PER_COUNTER = 128
WIDEST_ROTATION = 256
_LOW_32 = 0xFFFFFFFF
# The fp32 numbers nearest 1 / sqrt(R).
_FACTORS = {32: 0.17677669, 64: 0.125, 128: 0.088388346, 256: 0.0625}


def quantize_rotated(
    input: Tensor,
    messages: Tensor,
    bits: int,
    block: int,
    seed: int,
    unit: int,
    iteration: int,
    first: int = 0,
    lost: Tensor | None = None,
    divisor: Tensor | None = None,
) -> None:
    """See Operations and Signs."""
    numel = len(input) // max(len(messages), 1)
    for index, message in enumerate(messages if numel else ()):
        encoded, start = [], index * numel
        for here in tiles(numel):
            x = input[start : start + numel][here].float().view(-1, block)
            if lost is not None and divisor is not None:
                x = x + lost[index, here].float().view(-1, block) * divisor
            signs = _signs_like(x, first + start + here.start, seed, unit, iteration)
            rotated = rotate(x, signs)
            encoded.append(encode_rotated(rotated, bits))
            if lost is not None and divisor is not None:
                missing = rotated - decoded(*encoded[-1], bits)
                lost[index, here] = rotate_back(missing, signs).view(-1) * (1 / divisor)
        codes, stored = map(torch.cat, zip(*encoded, strict=True))
        write_message(message, codes, stored, LloydMaxFormat(bits, block))


def sum_rotated(
    messages: Sequence[Tensor] | Tensor,
    shard: Tensor,
    bits: int,
    block: int,
    seed: int,
    unit: int,
    iteration: int,
    first: int = 0,
    add: bool = False,
) -> None:
    """See Operations.

    Elements that belong to no parameter get noise, since a rotation mixes the elements of a block.
    """
    read = [read_message(message, len(shard), LloydMaxFormat(bits, block)) for message in messages]
    result = torch.empty_like(shard)
    for here in tiles(len(shard)):
        blocks = slice(here.start // block, here.stop // block)
        total = reduce(torch.add, (decoded(codes[blocks], stored[blocks], bits) for codes, stored in read))
        signs = _signs_like(total, first + here.start, seed, unit, iteration)
        result[here] = rotate_back(total, signs).view(-1)
    shard.copy_(shard + result if add else result)


def counters(first: int, numel: int, unit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counter words (low, high, unit), (numel / 128,) int64 each, of `numel` elements from `first` on."""
    index = first // SIGNS_PER_COUNTER + torch.arange(-(-numel // SIGNS_PER_COUNTER))
    return index & _LOW_32, index >> 32, torch.full_like(index, unit)


def random_signs(counter: tuple[Tensor, Tensor, Tensor], seed: int, iteration: int) -> Tensor:
    """The signs (128 · counters,) fp32, each 1 or -1, of elements with these counter words."""
    low, high, unit = counter
    words = philox(
        (low, high, unit, torch.full_like(low, iteration & _LOW_32)), (seed & _LOW_32, seed >> 32 & _LOW_32)
    )
    bits = torch.stack(words, dim=1)[..., None] >> torch.arange(32, device=low.device) & 1  # the lowest first
    return (1.0 - 2.0 * bits).flatten()


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """y (K, B) of fp32 blocks x (K, B) and signs (K, B)."""
    return butterflies(x * signs)


def rotate_back(y: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotate`, but for rounding."""
    return butterflies(y) * signs


def butterflies(x: Tensor) -> Tensor:
    """Each run of R elements of x (K, B) times the Hadamard matrix / sqrt(R)."""
    width, shape = min(x.shape[-1], WIDEST_ROTATION), x.shape
    h = 1
    while h < width:
        a, b = x.reshape(-1, 2, h).unbind(1)
        x = torch.empty_like(x).view(-1, 2, h)
        torch.add(a, b, out=x[:, 0])
        torch.sub(a, b, out=x[:, 1])
        h *= 2
    return x.reshape(shape) * _FACTORS[width]


def encode_rotated(y: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes (K, B) uint8 and scales (K,) bf16 of rotated fp32 blocks (K, B)."""
    z, power, finite, usable = normalised(y)
    codes = nearest_codes(z, root_mean_square(z), bits)
    ratio = ordered_sum(z * z) / ordered_sum(z * levels_of(codes, bits))
    return coded(codes, stored_scales(power * ratio.where(usable, 0.0), finite, usable))


def _signs_like(x: Tensor, first: int, seed: int, unit: int, iteration: int) -> Tensor:
    """The signs of blocks x (K, B) that begin with element `first` of the unit."""
    signs = random_signs(counters(first, x.numel(), unit), seed, iteration)
    return signs[: x.numel()].to(x.device).view(x.shape)
