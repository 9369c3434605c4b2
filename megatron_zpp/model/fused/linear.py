"""What follows the linear maps into heads and into the MLP, with the gradients of their biases.

Shapes: R rows, W columns, P programs of a backward along the rows.

The gradient of a bias is that of the map's output, summed over rows. Where a kernel makes that gradient
anyway, it sums it too, and the map itself has its bias without a gradient. GELU is GPT-2's approximation by
tanh(u), as x · sigmoid(2u): the compiler's tanh takes so many instructions that its kernels are slower than
memory is.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fused.math import GELU_CUBIC, GELU_SLOPE, LOG2_E, exp2, reciprocal

_ROWS, _COLUMNS, _WARPS = 16, 256, 8  # of a program at a time: 16 elements a thread
# The same for kernels.
ROWS, COLUMNS = map(tl.constexpr, (_ROWS, _COLUMNS))
_PROGRAMS = 4  # on each multiprocessor


def serves(module: nn.Module) -> bool:
    """Whether the functions here can take the place of the module."""
    return type(module) is nn.Linear and module.bias is not None


class LinearIntoSum(nn.Linear):
    """A map whose bias has its gradient where that of the residual sum is made: see fused/norm.norm."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        bias = self.bias.detach() if torch.compiler.is_compiling() else self.bias
        return F.linear(input, self.weight, bias)


def gelu_of_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """F.gelu(linear(x), approximate="tanh")."""
    return _gelu(F.linear(x, linear.weight, linear.bias.detach()), linear.bias)


def heads_of_linear(x: Tensor, linear: nn.Linear, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, D) -> queries, keys and values, each (B, T, heads, width) and a view of what the map makes."""
    mapped = F.linear(x, linear.weight, linear.bias.detach())
    return _Heads.apply(mapped.unflatten(-1, (3, heads, width)), linear.bias)


@triton_op("megatron_zpp_model::gelu", mutates_args={})
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Of x, which has `bias` already."""
    wide = x.float()
    return (wide * torch.sigmoid(wide * (GELU_SLOPE.value + GELU_CUBIC.value * wide * wide))).to(x.dtype)


@triton_op("megatron_zpp_model::gelu_backward", mutates_args={})
def _gelu_backward(of_out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and its sum over rows (W) fp32."""
    width = x.shape[-1]
    rows = x.numel() // width
    columns, programs = _grid(x, rows, width)
    gradient = torch.empty_like(x)
    sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    wrap_triton(_gelu_backward_kernel)[(columns, programs)](
        *(of_out, x, gradient, sums, rows, width),
        num_warps=_WARPS,
    )
    return gradient, sums.sum(0)


@triton_op("megatron_zpp_model::join_heads", mutates_args={})
def _join_heads(of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, 3, N, H) of three (B, T, N, H), and its sum over rows (3 · N · H) fp32."""
    batch, tokens, heads, head_width = of_q.shape
    rows, width = batch * tokens, heads * head_width
    _, programs = _grid(of_q, rows, 3 * width)
    joined = of_q.new_empty(batch, tokens, 3, heads, head_width)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=of_q.device)
    wrap_triton(_join_kernel)[(triton.cdiv(width, _COLUMNS), programs, 3)](
        *(of_q, of_k, of_v, joined, sums, rows, width),
        num_warps=_WARPS,
    )
    return joined, sums.sum(0).flatten()


def _grid(x: Tensor, rows: int, width: int) -> tuple[int, int]:
    """Programs along the columns and along the rows."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    columns = triton.cdiv(width, _COLUMNS)
    return columns, max(1, min(triton.cdiv(rows, _ROWS), _PROGRAMS * processors // columns))


def _save_x(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _of_gelu(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor]:
    (x,) = ctx.saved_tensors
    of_x, of_bias = _gelu_backward(of_out.contiguous(), x)
    return of_x, of_bias.to(x.dtype)


_gelu.register_autograd(_of_gelu, setup_context=_save_x)


class _Heads(torch.autograd.Function):
    """(B, T, 3, N, H), and the bias that is in it -> its three parts. An operator may not return views."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return joined.unbind(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        joined, of_bias = _join_heads(*(gradient.contiguous() for gradient in gradients))
        return joined, of_bias.to(joined.dtype)


@triton.jit
def _gelu_backward_kernel(
    of_out_ptr,  # (R, W), as are x and gradient
    x_ptr,
    gradient_ptr,
    sums_ptr,  # (P, W) fp32
    rows,
    width,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stride = tl.full([], width, tl.int64)  # or the largest inputs would not be reached
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * stride + columns[None, :]
        inside = (row[:, None] < rows) & (columns[None, :] < width)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        of_out = tl.load(of_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
        square = GELU_CUBIC * x * x
        gate = reciprocal(1 + exp2(x * (GELU_SLOPE + square) * -LOG2_E))
        gradient = of_out * gate * (1 + x * (1 - gate) * (GELU_SLOPE + 3 * square))
        sums += gradient
        tl.store(gradient_ptr + at, gradient, mask=inside)
    place = sums_ptr + tl.program_id(1) * width + columns
    tl.store(place, tl.sum(sums, axis=0), mask=columns < width)


@triton.jit
def _join_kernel(
    of_q_ptr,  # (R, W), as are those of k and v
    of_k_ptr,
    of_v_ptr,
    joined_ptr,  # (R, 3, W)
    sums_ptr,  # (P, 3, W) fp32
    rows,
    width,
):
    part = tl.program_id(2)
    source = of_q_ptr
    if part == 1:
        source = of_k_ptr
    if part == 2:
        source = of_v_ptr
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stride = tl.full([], width, tl.int64)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (columns[None, :] < width)
        x = tl.load(source + row[:, None] * stride + columns[None, :], mask=inside, other=0.0)
        sums += x.to(tl.float32)
        place = joined_ptr + row[:, None] * (3 * stride) + (part * width + columns)[None, :]
        tl.store(place, x, mask=inside)
    place = sums_ptr + (tl.program_id(1) * 3 + part) * width + columns
    tl.store(place, tl.sum(sums, axis=0), mask=columns < width)
