"""Inputs on which quantisers often fail: blocks of all awkward kinds in turn."""

import torch
from torch import Tensor

from megatron_zpp.ops.formats import QuantFormat

KINDS = 16


def awkward(rows: int, n: int, block: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers (rows, n) whose blocks are of all kinds in turn."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(rows * n // block, block, generator=generator)
    for index, x in enumerate(blocks):
        _make(x, (index + seed) % KINDS, dtype, generator)
    return blocks.to(dtype).view(rows, n)


def sprinkled(m: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers (m,), of which one in four is zero, subnormal, huge or not finite."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, limits.tiny / 4, -limits.tiny, limits.max, limits.max / 3, 1e-4, 1e4]
    special += [float("nan"), float("inf"), float("-inf")]
    x = torch.randn(m, generator=generator)
    chosen = torch.randint(4 * len(special), (m,), generator=generator)
    for index, value in enumerate(special):
        x[chosen == index] = value
    return x.to(dtype)


def _make(x: Tensor, kind: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Change a block of normal random numbers to a block of this kind."""
    size, limits = len(x), torch.finfo(dtype)
    place = torch.randint(size - 1, (), generator=generator)
    steps = torch.arange(size) % 255 - 127.0
    if kind == 0:
        x.zero_()
    elif kind == 1:
        x.zero_()[::2] *= -1.0  # zeros of both signs
    elif kind in (2, 3):  # ties of int8 and int4
        peak = {2: 128.0, 3: 8.0}[kind]
        x.copy_((steps % (2 * peak - 1) - peak + 1) + 0.5)
        x[place] = peak * (-1) ** int(place)
    elif kind == 4:
        x[place], x[place + 1] = -7.0, 7.0  # the sign of the scale depends on which one is the peak
    elif kind == 5:
        x *= limits.tiny / 4  # subnormals, and a scale below the smallest
    elif kind == 6:
        x *= 2.0**-118 if dtype != torch.float16 else 2.0**-14  # scales around the smallest normal number
    elif kind == 7:
        x[place] = limits.max / 2
    elif kind == 8:
        x[place] = limits.max
        x[place + 1] = -limits.max
    elif kind == 9:
        x[place] = float("nan")
    elif kind == 10:
        x[place] = float("inf")
    elif kind == 11:
        x[place] = float("-inf")
    elif kind == 12:
        x.fill_(-0.3)
    elif kind == 13:
        x.copy_(torch.exp2(-torch.arange(size) % 24.0))  # exponents from 0 to -23
    elif kind == 14:  # a bf16 scale that is a tie is rounded down most: codes reach 128.5 or 8.5
        x[place], x[place + 1] = (1 + 2.0**-8) * 16, (1 + 2.0**-8) * -16
    else:
        x *= 100.0


def random_messages(count: int, format: QuantFormat, numel: int, seed: int = 0) -> Tensor:
    """Messages (count, message_bytes(numel)) of random codes and scales, some of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = format.message_bytes(numel)
    messages = torch.randint(256, (count, size), dtype=torch.uint8, generator=generator)
    begin, blocks = numel * format.bits // 8, numel // format.block
    scales = torch.randn(count, blocks, generator=generator)
    chosen = torch.randint(40, (count, blocks), generator=generator)
    for index, value in enumerate((float("nan"), 0.0, 2.0**-126, 1e30, 3e38)):
        scales[chosen == index] = value
    stored = scales.bfloat16().view(torch.uint8)
    messages[:, begin : begin + stored.shape[1]] = stored
    messages[:, begin + stored.shape[1] :] = 0
    return messages
