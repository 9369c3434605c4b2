"""SwiGLU behind the map into gate and value, whose backward writes both halves of the gradient in one pass.

Shapes: R rows, F inner width. The compiler's own backward is a concatenation, each half of which reads the
inputs again; its sigmoid takes more instructions than one of the GPU's.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fused.math import LOG2_E, exp2, reciprocal

_BLOCK, _WARPS = 2048, 8  # elements of a program and its warps: one load of 16 bytes a thread and input


@triton_op("megatron_zpp_model::swiglu", mutates_args={})
def swiglu(x: Tensor) -> Tensor:
    """(…, 2F) -> (…, F): SiLU of the first half times the second."""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    wrap_triton(_forward_kernel)[_grid(x, width)](x, out, width, BLOCK=_BLOCK, num_warps=_WARPS)
    return out


@triton_op("megatron_zpp_model::swiglu_backward", mutates_args={})
def _swiglu_backward(of_out: Tensor, x: Tensor) -> Tensor:
    width = of_out.shape[-1]
    gradient = torch.empty_like(x)
    wrap_triton(_backward_kernel)[_grid(x, width)](of_out, x, gradient, width, BLOCK=_BLOCK, num_warps=_WARPS)
    return gradient


def _grid(x: Tensor, width: int) -> tuple[int, int]:
    return x.numel() // (2 * width), triton.cdiv(width, _BLOCK)


def save_first(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Keep the first input for the backward."""
    ctx.save_for_backward(inputs[0])


def _of_swiglu(ctx: Any, of_out: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return _swiglu_backward(of_out.contiguous(), x)


swiglu.register_autograd(_of_swiglu, setup_context=save_first)


@triton.jit
def _forward_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """(R, 2F) -> (R, F)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    share = reciprocal(1 + exp2(gate * -LOG2_E))
    tl.store(out_ptr + row * width + column, gate * share * up, mask=inside)


@triton.jit
def _backward_kernel(of_out_ptr, x_ptr, gradient_ptr, width, BLOCK: tl.constexpr):
    """(R, F) and (R, 2F) -> (R, 2F)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
    of_out = tl.load(of_out_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = reciprocal(1 + exp2(gate * -LOG2_E))
    of_gate = of_out * up * share * (1 + gate * (1 - share))
    tl.store(gradient_ptr + at, of_gate, mask=inside)
    tl.store(gradient_ptr + at + width, of_out * gate * share, mask=inside)
