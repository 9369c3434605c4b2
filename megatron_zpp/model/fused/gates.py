"""SwiGLU and GeGLU behind the map into gate and value; a backward writes both halves of the gradient at once.

Shapes: R rows, F inner width. The compiler's own backward is a concatenation, each half of which reads the
inputs again; its sigmoid takes more instructions than one of the GPU's.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.fused.math import GELU_CUBIC, GELU_SLOPE, LOG2_E, exp2, reciprocal

# Elements of a program and its warps: one load of 16 bytes a thread and input.
_PROGRAM = {"BLOCK": 2048, "num_warps": 8}


@triton_op("megatron_zpp_model::gated", mutates_args={})
def gated(x: Tensor, gelu: bool) -> Tensor:
    """(…, 2F) -> (…, F): SiLU of the first half, or GELU by tanh, times the second."""
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    wrap_triton(_forward_kernel)[_grid(x, width)](x, out, width, GELU=gelu, **_PROGRAM)
    return out


@triton_op("megatron_zpp_model::gated_backward", mutates_args={})
def _gated_backward(of_out: Tensor, x: Tensor, gelu: bool) -> Tensor:
    width = of_out.shape[-1]
    gradient = torch.empty_like(x)
    wrap_triton(_backward_kernel)[_grid(x, width)](of_out, x, gradient, width, GELU=gelu, **_PROGRAM)
    return gradient


def _grid(x: Tensor, width: int) -> tuple[int, int]:
    return x.numel() // (2 * width), triton.cdiv(width, _PROGRAM["BLOCK"])


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ctx.gelu = inputs
    ctx.save_for_backward(x)


def _of_gated(ctx: Any, of_out: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return _gated_backward(of_out.contiguous(), x, ctx.gelu), None


gated.register_autograd(_of_gated, setup_context=_save)


@triton.jit
def _slope(gate, GELU: tl.constexpr):
    """The argument of the sigmoid that is the gate's share, divided by the gate."""
    slope = tl.full(gate.shape, 1.0, tl.float32)
    if GELU:
        slope = GELU_SLOPE + GELU_CUBIC * gate * gate
    return slope


@triton.jit
def _forward_kernel(x_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """(R, 2F) -> (R, F)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    share = reciprocal(1 + exp2(gate * _slope(gate, GELU) * -LOG2_E))
    tl.store(out_ptr + row * width + column, gate * share * up, mask=inside)


@triton.jit
def _backward_kernel(of_out_ptr, x_ptr, gradient_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """(R, F) and (R, 2F) -> (R, 2F)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
    of_out = tl.load(of_out_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    slope = _slope(gate, GELU)
    share = reciprocal(1 + exp2(gate * slope * -LOG2_E))
    if GELU:
        slope += 2 * (slope - GELU_SLOPE)  # how fast that argument grows
    of_gate = of_out * up * share * (1 + gate * (1 - share) * slope)
    tl.store(gradient_ptr + at, of_gate, mask=inside)
    tl.store(gradient_ptr + at + width, of_out * gate * share, mask=inside)
