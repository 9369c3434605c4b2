"""Weight differences in plain torch: the oracle of difference-and-encode and of decode-and-add.

The weights w of an owner and the reference r that all ranks of its group hold (SDP4Bit, 2410.15526, section
3.1, codes the same differences). Per block, with every operation rounded to fp32 on its own:

    d = w - r
    s = bf16(rms(d))            rms = power · sqrt(sum(z²) / B), where d = z · power (`lloyd_max.normalised`)
    q: the level nearest d / s  |d| against the fp32 products boundary · s
    r = r + s · level[q]        the product is rounded, then the sum: no fused multiply-add

A block with scale 0 leaves r as it is, bit for bit. NaN and Inf in d make the scale NaN, and the block of r
NaN. The owner changes its reference by the same
function as every receiver, so all references keep equal bits, and what a code missed stays in w - r.
"""

import torch
from torch import Tensor

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.lloyd_max import (
    coded,
    decoded,
    nearest_codes,
    normalised,
    ordered_sum,
    read_message,
    stored_scales,
    write_message,
)
from megatron_zpp.ops.reference import tiles


def quantize_difference(
    weights: Tensor,
    reference: Tensor,
    message: Tensor,
    bits: int,
    block: int,
    skip: Tensor | None = None,
    squares: Tensor | None = None,
) -> None:
    """See Operations. Where `skip` is not 0 all scales, codes and squares are 0."""
    all_codes = [reference.new_empty(0, block).byte()]
    all_stored = [reference.new_empty(0).bfloat16()]
    for here in tiles(len(reference)):
        difference = weights[here].view(-1, block) - reference[here].view(-1, block)
        z, power, finite, usable = normalised(difference)
        stored = stored_scales(power * root_mean_square(z), finite, usable)
        codes, stored = coded(nearest_codes(difference, stored.float(), bits), stored)
        if skip is not None:
            difference, codes, stored = (
                torch.where(skip != 0, torch.zeros_like(x), x) for x in (difference, codes, stored)
            )
        if squares is not None:
            blocks = slice(here.start // block, here.stop // block)
            lost = difference - decoded(codes, stored, bits)
            squares[0, blocks] = ordered_sum(difference * difference)
            squares[1, blocks] = ordered_sum(lost * lost)
        all_codes.append(codes)
        all_stored.append(stored)
    write_message(message, torch.cat(all_codes), torch.cat(all_stored), LloydMaxFormat(bits, block))


def add_difference(messages: Tensor, reference: Tensor, bits: int, block: int) -> None:
    """See Operations.

    No level is zero, so elements between parameters that share a block with elements of one get noise.
    """
    for message, part in zip(messages, reference.view(len(messages), -1), strict=True):
        codes, stored = read_message(message, len(part), LloydMaxFormat(bits, block))
        for here in tiles(len(part)):
            blocks = slice(here.start // block, here.stop // block)
            old = part[here].view(-1, block)
            moved = old + decoded(codes[blocks], stored[blocks], bits)
            part[here] = torch.where((stored[blocks] == 0)[:, None], old, moved).view(-1)


def root_mean_square(z: Tensor) -> Tensor:
    """Return the root mean square (K,) of fp32 blocks (K, B), with the squares added by `ordered_sum`."""
    mean = ordered_sum(z * z) * (1.0 / z.shape[1])  # exact: B is a power of two
    return mean.double().sqrt().float()
