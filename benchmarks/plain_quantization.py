"""The fused operations as one would write them in plain torch: what the kernels are measured against.

Symmetric quantisation as it is usually written, scale and codes apart, outputs allocated by torch. The same
functions go through torch.compile.
"""

import torch
from torch import Tensor

from megatron_zpp.ops.formats import QuantFormat

Quantized = tuple[Tensor, Tensor]  # codes and scales, blocks first


def hadamard(device: torch.device) -> Tensor:
    """The matrix (32, 32) of a rotation."""
    matrix = torch.ones(1, 1, device=device)
    for _ in range(5):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / 32**0.5


def quantize(
    x: Tensor, matrix: Tensor | None = None, *, format: QuantFormat, stochastic: bool = False
) -> Quantized:
    """x of any shape, in blocks."""
    x = x.float()
    if matrix is not None:
        x = x.view(-1, 32) @ matrix
    x = x.reshape(-1, format.block)
    top = 448.0 if format.code_type == "fp8" else 2.0 ** (format.bits - 1) - 1
    scales = (x.abs().amax(1, keepdim=True).clamp(min=1e-30) / top).to(format.scales)
    y = x / scales.float()
    if format.code_type == "fp8":
        return y.to(torch.float8_e4m3fn), scales
    y = (y + torch.rand_like(y)).floor() if stochastic else y.round()
    codes = y.clamp(-top - 1, top).to(torch.int8)
    if format.code_type == "int4":
        codes = codes[:, 0::2] & 15 | codes[:, 1::2] << 4
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, format: QuantFormat, matrix: Tensor | None = None) -> Tensor:
    """fp32 (blocks, block)."""
    if format.code_type == "int4":
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1).flatten(-2)
    x = codes.float() * scales.float()
    if matrix is not None:
        x = (x.view(-1, 32) @ matrix).view(-1, format.block)
    return x


def dequantize_into(
    codes: Tensor, scales: Tensor, output: Tensor, matrix: Tensor | None = None, *, format: QuantFormat
) -> None:
    """Into an output of any number format."""
    output.copy_(dequantize(codes, scales, format, matrix).view(output.shape))


def total(messages: list[Quantized], format: QuantFormat) -> Tensor:
    """The fp32 sum of messages."""
    return sum(dequantize(*message, format) for message in messages)


def sum_quantize(
    messages: list[Quantized], error: Tensor | None = None, *, format: QuantFormat, stochastic: bool = False
) -> Quantized:
    """Sum and encode again, with what is lost kept in `error`."""
    x = total(messages, format)
    if error is not None:
        x = x + error.view(x.shape)
    codes, scales = quantize(x, format=format, stochastic=stochastic)
    if error is not None:
        error.copy_((x - dequantize(codes, scales, format)).view(error.shape))
    return codes, scales


def sum_into(messages: list[Quantized], shard: Tensor, *, format: QuantFormat) -> None:
    """Sum, mean."""
    shard.copy_(total(messages, format).view(shard.shape) / len(messages))


def sum_parts(parts: Tensor, shard: Tensor) -> None:
    """Sum of rows in fp32, mean."""
    shard.copy_(parts.sum(0, dtype=torch.float32) / len(parts))


def sum_parts_and_squares(parts: Tensor, shard: Tensor, squares: Tensor) -> None:
    """The same, and the squares of each 256 elements of it."""
    sum_parts(parts, shard)
    sum_squares(shard, squares)


def sum_squares(x: Tensor, sums: Tensor) -> None:
    """Of each 256 elements, in fp32."""
    sums.copy_(x.view(-1, 256).float().square().sum(1))


def adamw(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gather_source: Tensor | None = None
) -> None:
    """One step, written out."""
    exp_avg.lerp_(gradient, 0.1)
    exp_avg_sq.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
    master.mul_(1 - 3e-5).addcdiv_(exp_avg / 0.1, (exp_avg_sq / 0.05).sqrt() + 1e-8, value=-3e-4)
    if gather_source is not None:
        gather_source.copy_(master)


def fused_adamw(
    master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gather_source: Tensor | None = None
) -> None:
    """torch's own fused kernel, then the cast."""
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
    """`adamw`, then the new weights' encoding."""
    adamw(*states)
    return quantize(states[0], format=format)


def fused_adamw_quantize(*states: Tensor, format: QuantFormat) -> Quantized:
    """`fused_adamw`, then the new weights' encoding."""
    fused_adamw(*states)
    return quantize(states[0], format=format)
