"""The fused operations in plain torch, with which the kernels are compared.

Symmetric quantisation in its usual form: scales and codes in two tensors, allocated by torch. The same
functions go through torch.compile.
"""

import torch
from torch import Tensor

from megatron_zpp.ops.formats import QuantFormat

Quantized = tuple[Tensor, Tensor]  # codes and scales, blocks first


def hadamard(device: torch.device) -> Tensor:
    """The matrix (32, 32) of the rotation."""
    matrix = torch.ones(1, 1, device=device)
    for _ in range(5):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / 32**0.5


def quantize(
    x: Tensor, matrix: Tensor | None = None, *, format: QuantFormat, stochastic: bool = False
) -> Quantized:
    """Codes and scales of x, which may have any shape."""
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
    """The fp32 values (blocks, block)."""
    if format.code_type == "int4":
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1).flatten(-2)
    x = codes.float() * scales.float()
    if matrix is not None:
        x = (x.view(-1, 32) @ matrix).view(-1, format.block)
    return x


def dequantize_into(
    codes: Tensor, scales: Tensor, output: Tensor, matrix: Tensor | None = None, *, format: QuantFormat
) -> None:
    """Decode to `output`, of any dtype."""
    output.copy_(dequantize(codes, scales, format, matrix).view(output.shape))


def total(messages: list[Quantized], format: QuantFormat) -> Tensor:
    """The fp32 sum of messages."""
    return sum(dequantize(*message, format) for message in messages)


def sum_quantize(
    messages: list[Quantized], error: Tensor | None = None, *, format: QuantFormat, stochastic: bool = False
) -> Quantized:
    """Encode the sum of messages, with the encoding error kept in `error`."""
    x = total(messages, format)
    if error is not None:
        x = x + error.view(x.shape)
    codes, scales = quantize(x, format=format, stochastic=stochastic)
    if error is not None:
        error.copy_((x - dequantize(codes, scales, format)).view(error.shape))
    return codes, scales


def sum_into(messages: list[Quantized], shard: Tensor, *, format: QuantFormat) -> None:
    """Write the mean of messages to `shard`."""
    shard.copy_(total(messages, format).view(shard.shape) / len(messages))


def sum_parts(parts: Tensor, shard: Tensor) -> None:
    """Write the mean of the rows to `shard`, summed in fp32."""
    shard.copy_(parts.sum(0, dtype=torch.float32) / len(parts))


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
