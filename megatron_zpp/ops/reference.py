"""The operations in plain torch: the oracle of the kernels, and their substitute where none can be compiled.

Functions have the signatures of the operators, and ops/operations.py says what each of them does. Each
rounding is one torch operation: fp32 operations are not fused, exact products are computed in fp64, and bits
are changed as integers. So every device gives the same bits. Tensors are processed in tiles of `TILE`
elements, so scratch memory does not grow with them.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from megatron_zpp.ops.adamw import AdamWScalars, adamw_step
from megatron_zpp.ops.formats import SCALE_BYTES, SQUARES_BLOCK, CodeType, QuantFormat
from megatron_zpp.ops.lloyd_max import BF16_NAN, SMALLEST_NORMAL, ordered_sum

# R rows, n columns, G output messages, P input messages, m elements, K blocks, B elements per block
TILE = 1 << 20
_FACTORS = {"int8": -(2.0**-7), "int4": -(2.0**-3)}
_FP16_MAX = 65504.0


def tiles(numel: int) -> list[slice]:
    """The elements of a run, TILE at a time."""
    return [slice(start, min(start + TILE, numel)) for start in range(0, numel, TILE)]


def quantize(input: Tensor, messages: Tensor, code_type: CodeType, block: int) -> None:
    format = QuantFormat(code_type, block)
    count, n = len(input) // len(messages), input.shape[1]  # of the rows of a message
    for group, message in enumerate(messages):
        for row in range(count):
            for here in tiles(n):
                x = input[group * count + row, here].float()
                _write_blocks(message, format, count * n, row * n + here.start, x)


def dequantize(messages: Tensor, output: Tensor, code_type: CodeType, block: int) -> None:
    format = QuantFormat(code_type, block)
    count, n = len(output) // len(messages), output.shape[1]  # of the rows of a message
    for group, message in enumerate(messages):
        for row in range(count):
            for here in tiles(n):
                first = row * n + here.start
                elements = slice(first, first + here.stop - here.start)
                x = _sum_of(message[None], format, count * n, elements)
                if output.dtype == torch.float16:  # finite numbers saturate, infinity does not
                    x = torch.where(x.isinf(), x, x.clamp(-_FP16_MAX, _FP16_MAX))
                output[group * count + row, here] = x.to(output.dtype)


def sum_quantize(messages: Tensor, output: Tensor, code_type: CodeType, block: int) -> None:
    """See Operations; messages are added in order."""
    format = QuantFormat(code_type, block)
    m = format.numel_of(messages)
    part = m // max(len(output), 1)
    for group, message in enumerate(output):
        for tile in tiles(part):
            here = slice(group * part + tile.start, group * part + tile.stop)
            _write_blocks(message, format, part, tile.start, _sum_of(messages, format, m, here))


def sum_into(messages: Tensor, shard: Tensor, code_type: CodeType, block: int, add: bool) -> None:
    """See Operations; messages are added in order."""
    format = QuantFormat(code_type, block)
    for here in tiles(len(shard)):
        _put(shard[here], _sum_of(messages, format, len(shard), here), add)


def sum_parts(
    parts: Tensor,
    shard: Tensor,
    add: bool,
    own: Tensor | None = None,
    group_rank: int = 0,
    squares: Tensor | None = None,
) -> None:
    """See Operations; rows, which may be any stride apart, are added in order."""
    rows = list(parts)
    if own is not None:
        rows[group_rank] = own
    for here in tiles(len(shard)):
        total = rows[0][here].float()
        for other in rows[1:]:
            total = total + other[here].float()
        _put(shard[here], total, add)
    if squares is not None:
        sum_squares(shard, squares)


def sum_squares(input: Tensor, sums: Tensor) -> None:
    """See Operations; the order of the additions is that of `ordered_sum`."""
    for here in tiles(len(input)):
        x = input[here].float().view(-1, SQUARES_BLOCK)
        sums[here.start // SQUARES_BLOCK :][: len(x)] = ordered_sum(x * x)


def adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gather_source: Tensor | None,
    device_scalars: Sequence[Tensor],
    host_scalars: Sequence[float],
    decayed: int,
) -> None:
    """See Operations and `AdamWScalars`. Nothing is written if `found_inf` is not 0."""
    states = master, gradient, exp_avg, exp_avg_sq
    scalars = AdamWScalars.unpacked(device_scalars, host_scalars)
    skip = scalars.found_inf != 0
    for tile in tiles(len(master)):
        new = adamw_step(scalars, *(state[tile] for state in states), decayed=decayed - tile.start)
        for old, changed in zip((master, exp_avg, exp_avg_sq), new, strict=True):
            old[tile] = torch.where(skip, old[tile], changed)
        if gather_source is not None:
            gather_source[tile] = torch.where(skip, gather_source[tile], new[0].to(gather_source.dtype))


def adamw_quantize(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    message: Tensor,
    device_scalars: Sequence[Tensor],
    host_scalars: Sequence[float],
    decayed: int,
    code_type: CodeType,
    block: int,
) -> None:
    """`adamw` that encodes the new weights as `message` (message_bytes(m),)."""
    states, scalars = (master, gradient, exp_avg, exp_avg_sq), (device_scalars, host_scalars)
    adamw(*states, None, *scalars, decayed)
    encoded = torch.empty_like(message)
    quantize(master[None], encoded[None], code_type, block)
    found_inf = AdamWScalars.unpacked(*scalars).found_inf
    message.copy_(torch.where(found_inf != 0, message, encoded))


def _write_blocks(message: Tensor, format: QuantFormat, numel: int, first: int, x: Tensor) -> None:
    """Encode x (n,) fp32, whole blocks, as the elements from `first` on of a message of `numel` elements."""
    codes, scales, padding = format.parts_of(message, numel)
    blocks = slice(first // format.block, (first + len(x)) // format.block)
    encoded, stored = _encode_blocks(x.reshape(-1, format.block), format)
    codes[blocks], scales[blocks] = encoded, stored.view(torch.uint8).view(-1, SCALE_BYTES)
    padding.zero_()


def _sum_of(messages: Tensor, format: QuantFormat, m: int, here: slice) -> Tensor:
    """Return the fp32 sum of the elements `here`, whole blocks, of all messages, added in order."""
    blocks, values = slice(here.start // format.block, here.stop // format.block), []
    for message in messages:
        codes, scales, _ = format.parts_of(message, m)
        stored = scales[blocks].flatten().clone().view(torch.bfloat16)
        values.append(_decode_blocks(codes[blocks], stored, format))
    return reduce(torch.add, values).flatten()


def _put(target: Tensor, total: Tensor, add: bool) -> None:
    target.copy_(target + total if add else total)


def _encode_blocks(x: Tensor, format: QuantFormat) -> tuple[Tensor, Tensor]:
    """Two's complement codes (K, bytes) and scales (K,) of fp32 blocks x (K, B), rounded to nearest."""
    finite = x.isfinite().all(1)
    magnitude = x.abs().amax(1)
    peak = torch.where((x == magnitude[:, None]).any(1), magnitude, -magnitude)
    scale = (peak * _FACTORS[format.code_type]).bfloat16()
    usable = finite & (scale.float().abs() >= SMALLEST_NORMAL)  # whether a block has codes other than zeros
    bits = torch.where(usable, scale, 0.0).view(torch.int16)
    stored = bits.masked_fill(~finite, BF16_NAN).view(torch.bfloat16)
    inverse = torch.where(usable, stored.float().reciprocal(), 0.0)[:, None]
    x = torch.where(usable[:, None], x, 0.0)
    q = torch.round(x.double() * inverse.double())  # the product of two fp32 numbers is exact in fp64
    largest = 2 ** (format.bits - 1) - 1
    q = q.clamp(-largest - 1, largest).to(torch.int8).view(torch.uint8)
    return q if format.bits == 8 else q[:, 0::2] & 15 | q[:, 1::2] << 4, stored


def _decode_blocks(codes: Tensor, stored: Tensor, format: QuantFormat) -> Tensor:
    """The fp32 values (K, B) of codes (K, bytes) and scales (K,); a NaN scale makes its block NaN."""
    if format.code_type == "int8":
        numbers = codes.view(torch.int8).float()
    else:
        halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(torch.int8)
        numbers = ((halves ^ 8) - 8).float()
    return numbers * stored.float()[:, None]
