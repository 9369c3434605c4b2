"""The fused operations in plain torch, with which the kernels are compared.

Symmetric quantisation in its usual form: scales and codes in two tensors, allocated by torch. The same
functions go through torch.compile.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.lloyd_max import BOUNDARIES, LEVELS

Quantized = tuple[Tensor, Tensor]  # codes and scales, blocks first


def hadamard(device: torch.device, size: int) -> Tensor:
    """Return the matrix (size, size) of a rotation."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def lloyd_max(device: torch.device) -> tuple[Tensor, Tensor]:
    """Boundaries (15,) and levels (16,) of 4 bits."""
    positive, inner = torch.tensor(LEVELS[4]), torch.tensor(BOUNDARIES[4])
    boundaries = torch.cat((-inner.flip(0), torch.zeros(1), inner))
    return boundaries.to(device), torch.cat((-positive.flip(0), positive)).to(device)


def _nibbles(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _level(codes: Tensor, levels: Tensor) -> Tensor:
    return levels[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()]


def quantize_difference(weights: Tensor, reference: Tensor, boundaries: Tensor) -> Quantized:
    """4-bit Lloyd-Max codes of weights less the reference, in blocks of 256."""
    difference = (weights - reference).view(-1, 256)
    scales = difference.square().mean(1, keepdim=True).sqrt().bfloat16()
    codes = torch.bucketize(difference / scales.float(), boundaries, right=True).to(torch.uint8)
    return _nibbles(codes), scales


def add_difference(codes: Tensor, scales: Tensor, reference: Tensor, levels: Tensor) -> None:
    """Move the reference by the codes."""
    reference += (_level(codes, levels) * scales.float()).view(-1)


def quantize_rotated(
    x: Tensor, signs: Tensor, matrix: Tensor, boundaries: Tensor, levels: Tensor
) -> Quantized:
    """4-bit Lloyd-Max codes of rotated blocks of 256, with nearly unbiased scales."""
    y = (x.float() * signs).view(-1, 256) @ matrix
    codes = torch.bucketize(y / y.square().mean(1, keepdim=True).sqrt(), boundaries, right=True)
    scales = y.square().sum(1, keepdim=True) / (y * levels[codes]).sum(1, keepdim=True)
    return _nibbles(codes.to(torch.uint8)), scales.bfloat16()


def sum_rotated(
    messages: list[Quantized], shard: Tensor, signs: Tensor, matrix: Tensor, levels: Tensor
) -> None:
    """Write the sum of messages to `shard`, rotated back once."""
    rotated: Any = sum(_level(codes, levels) * scales.float() for codes, scales in messages)
    shard.copy_((rotated @ matrix).view(-1) * signs)


def quantize(x: Tensor, *, format: QuantFormat) -> Quantized:
    """Return codes and scales of x, which may have any shape."""
    x = x.float().reshape(-1, format.block)
    top = 2.0 ** (format.bits - 1) - 1
    scales = (x.abs().amax(1, keepdim=True).clamp(min=1e-30) / top).bfloat16()
    codes = (x / scales.float()).round().clamp(-top - 1, top).to(torch.int8)
    if format.code_type == "int4":
        codes = codes[:, 0::2] & 15 | codes[:, 1::2] << 4
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, format: QuantFormat) -> Tensor:
    """Return the fp32 values (blocks, block)."""
    if format.code_type == "int4":
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1).flatten(-2)
    return codes.float() * scales.float()


def dequantize_into(codes: Tensor, scales: Tensor, output: Tensor, *, format: QuantFormat) -> None:
    """Decode to `output`, of any dtype."""
    output.copy_(dequantize(codes, scales, format).view(output.shape))


def total(messages: list[Quantized], format: QuantFormat) -> Tensor:
    """The fp32 sum of messages."""
    summed: Any = sum(
        dequantize(*message, format) for message in messages
    )  # to its stubs perhaps the integer 0
    return summed


def sum_quantize(messages: list[Quantized], *, format: QuantFormat) -> Quantized:
    """Encode the sum of messages."""
    return quantize(total(messages, format), format=format)


def sum_into(messages: list[Quantized], shard: Tensor, *, format: QuantFormat) -> None:
    """Write the sum of messages to `shard`."""
    shard.copy_(total(messages, format).view(shard.shape))


def sum_parts(parts: Tensor, shard: Tensor) -> None:
    """Write the sum of the rows, in fp32, to `shard`."""
    shard.copy_(parts.sum(0, dtype=torch.float32))


def sum_parts_and_squares(parts: Tensor, shard: Tensor, squares: Tensor) -> None:
    """`sum_parts`, then `sum_squares` of the result."""
    sum_parts(parts, shard)
    sum_squares(shard, squares)


def sum_squares(x: Tensor, sums: Tensor) -> None:
    """Write the sum of squares of each 256 elements to `sums`, in fp32."""
    sums.copy_(x.view(-1, 256).float().square().sum(1))


def adamw(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gather_source: Tensor | None = None
) -> None:
    """One step of AdamW in separate operations."""
    exp_avg.lerp_(gradient, 0.1)
    exp_avg_sq.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
    master.mul_(1 - 3e-5).addcdiv_(exp_avg / 0.1, (exp_avg_sq / 0.05).sqrt() + 1e-8, value=-3e-4)
    if gather_source is not None:
        gather_source.copy_(master)


def fused_adamw(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gather_source: Tensor | None = None
) -> None:
    """One step by torch's fused kernel, then a cast."""
    one = torch.ones((), device=master.device)
    torch._fused_adamw_(
        *([master], [gradient], [exp_avg], [exp_avg_sq], [], [one]),
        lr=3e-4,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=one,
        found_inf=one - 1,
    )
    if gather_source is not None:
        gather_source.copy_(master)


def adamw_quantize(*states: Tensor, format: QuantFormat) -> Quantized:
    """`adamw`, then `quantize` of the new weights."""
    adamw(*states)
    return quantize(states[0], format=format)


def fused_adamw_quantize(*states: Tensor, format: QuantFormat) -> Quantized:
    """`fused_adamw`, then `quantize` of the new weights."""
    fused_adamw(*states)
    return quantize(states[0], format=format)
