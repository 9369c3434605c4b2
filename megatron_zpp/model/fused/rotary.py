"""Rotary positions of queries and keys, as one kernel from the map into heads to attention, and back.

Shapes: B batch, T tokens, R = B · T rows, N query heads, G heads of keys and values, H head width, C pairs of
rotated channels, A rows of angles: R, or T where all texts have the same positions.

The forward writes rotated queries and keys, and values, into one new tensor, so that what the map made is
free before the backward, which needs none of it. The backward writes the gradient of the map's output at
once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.rotary import Rotation

_HEADS = 64  # at most, of a program at a time


def rotate_heads(
    qkv: Tensor, heads: int, groups: int, head_width: int, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (N + 2G) · H) -> rotated queries (B, T, N, H), rotated keys and values, each (B, T, G, H)."""
    assert rotation.cos is not None
    assert rotation.sin is not None
    parts = qkv.unflatten(-1, (heads + 2 * groups, head_width))
    return _RotatedHeads.apply(parts, rotation.cos, rotation.sin, heads, rotation.interleaved)


class _RotatedHeads(torch.autograd.Function):
    """(B, T, N + 2G, H) -> views of one new tensor. An operator may not return views."""

    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        groups = (parts.shape[2] - heads) // 2
        rotated = _rotate(parts, None, None, cos, sin, heads, groups, interleaved)
        return tuple(rotated.split([heads, groups, groups], 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_q, of_k, of_v = (gradient.contiguous() for gradient in gradients)
        heads, groups = of_q.shape[2], of_k.shape[2]
        found = _rotate(of_q, of_k, of_v, *ctx.saved_tensors, heads, groups, ctx.interleaved)
        return found, None, None, None, None


@triton_op("megatron_zpp_model::rotate", mutates_args={})
def _rotate(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    interleaved: bool,
) -> Tensor:
    """All heads (B, T, N + 2G, H) with the first N + G of them rotated.

    With k and v, the gradient of that from the gradients of its three parts: rotated back.
    """
    batch, tokens, _, head_width = q.shape
    whole, pairs = heads + 2 * groups, cos.shape[-1]
    out = q.new_empty(batch, tokens, whole, head_width)
    # Without k and v another tensor is passed, and not touched.
    wrap_triton(_rotate_kernel)[(batch * tokens,)](
        *(q, q if k is None else k, q if v is None else v, cos, sin, out),
        *(cos.numel() // pairs, heads, groups),
        JOINS=k is not None,
        INTERLEAVED=interleaved,
        **_shape(whole, head_width, pairs),
    )
    return out


def _shape(heads: int, width: int, pairs: int) -> dict[str, int]:
    """Of a program, for all heads: 16 elements a thread, or more where that takes more than 8 warps."""
    rest = width - 2 * pairs
    block, pair_block = min(_HEADS, triton.next_power_of_2(heads)), triton.next_power_of_2(pairs)
    return {
        "WIDTH": width,
        "PAIRS": pairs,
        "HEAD_BLOCK": block,
        "PAIR_BLOCK": pair_block,
        "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0,
        "num_warps": min(max(block * pair_block // 256, 1), 8),
    }


@triton.jit
def _load(
    q_ptr, k_ptr, v_ptr, row, head, channel, inside, heads, groups, JOINS: tl.constexpr, WIDTH: tl.constexpr
):
    """Channels of heads from one tensor of all heads, or from a tensor of each kind; fp32."""
    if JOINS:
        key, value = head - heads, head - heads - groups
        q_at, k_at = (row * heads + head) * WIDTH + channel, (row * groups + key) * WIDTH + channel
        v_at = (row * groups + value) * WIDTH + channel
        x = tl.load(q_ptr + q_at, mask=inside & (key < 0), other=0.0).to(tl.float32)
        x += tl.load(k_ptr + k_at, mask=inside & (key >= 0) & (value < 0), other=0.0).to(tl.float32)
        x += tl.load(v_ptr + v_at, mask=inside & (value >= 0), other=0.0).to(tl.float32)
    else:
        at = (row * (heads + 2 * groups) + head) * WIDTH + channel
        x = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rotate_kernel(
    q_ptr,  # (R, N, H), or (R, N + 2G, H) of all heads
    k_ptr,  # (R, G, H), as is v
    v_ptr,
    cos_ptr,  # (A, C) fp32, as is sin
    sin_ptr,
    out_ptr,  # (R, N + 2G, H)
    angles,
    heads,
    groups,
    JOINS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    there = pair < PAIRS
    angle = (row % angles) * PAIRS + pair
    cos = tl.load(cos_ptr + angle, mask=there, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=there, other=0.0)
    if JOINS:
        sin = -sin  # the gradient is rotated back
    whole = heads + 2 * groups
    for begin in range(0, whole, HEAD_BLOCK):
        head = begin + tl.arange(0, HEAD_BLOCK)[:, None]
        inside = (head < whole) & there
        if INTERLEAVED:
            channel = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
            both = (head < whole) & (channel < 2 * PAIRS)
            x = _load(q_ptr, k_ptr, v_ptr, row, head, channel, both, heads, groups, JOINS, WIDTH)
            a, b = tl.split(tl.reshape(x, (HEAD_BLOCK, PAIR_BLOCK, 2)))
        else:
            a = _load(q_ptr, k_ptr, v_ptr, row, head, pair, inside, heads, groups, JOINS, WIDTH)
            b = _load(q_ptr, k_ptr, v_ptr, row, head, PAIRS + pair, inside, heads, groups, JOINS, WIDTH)
        rotated = head < heads + groups
        c, s = tl.where(rotated, cos, 1.0), tl.where(rotated, sin, 0.0)
        place = out_ptr + (row * whole + head) * WIDTH
        if INTERLEAVED:
            tl.store(place + channel, tl.interleave(a * c - b * s, b * c + a * s), mask=both)
        else:
            tl.store(place + pair, a * c - b * s, mask=inside)
            tl.store(place + PAIRS + pair, b * c + a * s, mask=inside)
        if REST_BLOCK:
            channel = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
            inside = (head < whole) & (channel < WIDTH)
            x = _load(q_ptr, k_ptr, v_ptr, row, head, channel, inside, heads, groups, JOINS, WIDTH)
            tl.store(place + channel, x, mask=inside)
