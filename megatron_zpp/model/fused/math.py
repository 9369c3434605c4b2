"""Functions of fp32 whose exponentials and reciprocals are one instruction each; below 1e-38 is 0 to them."""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# GELU by tanh is x times the sigmoid of x (GELU_SLOPE + GELU_CUBIC x²).
GELU_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
GELU_CUBIC = tl.constexpr(0.044715 * 2 * math.sqrt(2 / math.pi))


@triton.jit
def exp2(x):
    """2^x."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """1 / x."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def squashed(x, cap):
    """tanh(x / cap), within 3e-7."""
    return 1 - 2 * reciprocal(1 + exp2(x * (2 * LOG2_E / cap)))
