"""Attention of context ranks by all-to-all of heads (DeepSpeed-Ulysses, 2309.14509).

Shapes: B batch, S tokens of a sample, C context ranks, L = S / 2C tokens of a chunk, N query heads, G heads
of keys and values (G divides N), H head width.

Outside of attention a rank has all heads of S / C tokens, and inside it some heads of all tokens, N / C: one
exchange brings queries, keys and values there, and another one brings the result back.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.context.parts import from_parts, to_parts
from megatron_zpp.model.masks import Mask
from megatron_zpp.model.scores import Scores


class Exchange(torch.autograd.Function):
    """Exchange some tensors at once, from tokens to heads if `to_heads`; gradients go the other way.

    Between both layouts each element is copied once before it is sent, and once after. The message to a rank
    has one tensor behind the other, and of each tensor its first chunk (B, L, heads, H) before its last one.
    """

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(tensors, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(gradients, ctx.group, not ctx.to_heads)


def _exchange(tensors: Sequence[Tensor], group: TensorGroup, to_heads: bool) -> tuple[Tensor, ...]:
    """`to_heads`: each (B, S / C, N, H) -> (B, S, N / C, H); else the other way."""
    ranks = group.size
    if to_heads:
        # Each (B, S / C, N, H) -> chunks of the heads of each rank, (C, 2, B, L, N / C, H).
        split = [x.unflatten(2, (ranks, -1)).unflatten(1, (2, -1)) for x in tensors]
        pieces = [x.permute(3, 1, 0, 2, 4, 5) for x in split]
        message = torch.cat([piece.flatten(1) for piece in pieces], 1)
        shapes = [piece.shape for piece in pieces]
    else:
        # Of all tensors at once: the compiler would copy what is joined twice.
        chunks = [to_parts(x, ranks) for x in tensors]
        ordered = [each[2 * rank + last] for rank in range(ranks) for each in chunks for last in range(2)]
        message = torch.cat([chunk.flatten() for chunk in ordered]).view(ranks, -1)
        shapes = [torch.Size((ranks, 2, *each[0].shape)) for each in chunks]
    received = group.exchange_parts(message).split([math.prod(shape[1:]) for shape in shapes], 1)
    parts = [x.view(shape) for x, shape in zip(received, shapes, strict=True)]  # each (C, 2, B, L, N / C, H)
    if to_heads:
        return tuple(from_parts(part) for part in parts)
    return tuple(part.permute(2, 1, 3, 0, 4, 5).flatten(3, 4).flatten(1, 2) for part in parts)


class AllToAllHeads(AttentionKernel):
    """Attention by `kernel`, of whole samples and some of the heads; C divides N.

    Where C does not divide G, heads of keys and values are repeated until it does.
    """

    def __init__(self, kernel: AttentionKernel, group: TensorGroup) -> None:
        self._kernel, self._group = kernel, group
        self.compiled, self.splits_graphs = kernel.compiled, kernel.splits_graphs
        self.context_ranks = group.size

    def describe(self) -> str:
        kernel = self._kernel.describe()
        return f"all-to-all of heads among {self.context_ranks} context ranks{kernel and f', {kernel}'}"

    def sent(
        self, heads: int, groups: int, head_width: int, tokens: int, window: int | None
    ) -> tuple[int, int, int]:
        """See AttentionKernel; the same for any window. The result is sent last."""
        ranks = self.context_ranks
        wholes = 2 * (heads + math.lcm(groups, ranks)) * head_width, heads * head_width
        all_of_them, result = (whole // ranks * (ranks - 1) for whole in wholes)
        return all_of_them, all_of_them, result

    def mask(self, x: Tensor, window: int | None, ends: Tensor | None) -> Mask:
        """That of the kernel for whole samples; x (B, S / C, …)."""
        whole = x.new_empty(1).expand(len(x), x.shape[1] * self.context_ranks, 1)  # without memory
        return self._kernel.mask(whole, window, ends)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        """Queries (B, S / C, N, H), keys and values (B, S / C, G, H) -> (B, S / C, N, H)."""
        assert dropout == 0.0, "check_context_ranks refuses it"
        ranks, heads, groups = self.context_ranks, q.shape[2], k.shape[2]
        repeated = math.lcm(groups, ranks)
        if repeated != groups:
            k, v = (part.repeat_interleave(repeated // groups, 2) for part in (k, v))
        q, k, v = Exchange.apply(self._group, True, q, k, v)  # each (B, S, …, H)
        mixed = self._kernel(q, k, v, dropout, mask, self._own(scores, heads // ranks))  # (B, S, N / C, H)
        (returned,) = Exchange.apply(self._group, False, mixed)
        return returned

    def _own(self, scores: Scores, heads: int) -> Scores:
        """The scores of this rank's heads, of which there are so many."""
        own = slice(self._group.rank * heads, (self._group.rank + 1) * heads)
        slopes = None if scores.slopes is None else scores.slopes[own]
        return replace(scores, slopes=slopes, sinks=None if scores.sinks is None else scores.sinks[own])
