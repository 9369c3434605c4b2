"""Attention of context ranks by all-to-all of heads (DeepSpeed-Ulysses, 2309.14509).

Shapes: B batch, S tokens of a sample, C context ranks, N query heads, G heads of keys and values (G divides
N), H head width.

Outside of attention a rank has all heads of S / C tokens, and inside it some heads of all tokens, N / C: one
exchange brings queries, keys and values there, and another one brings the result back.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.context.parts import from_parts, to_parts
from megatron_zpp.model.masks import Causal, InsideDocuments, Mask, SlidingWindow
from megatron_zpp.model.scores import PLAIN_SCORES, Scores


class Exchange(torch.autograd.Function):
    """(C, …), a part for each rank -> what each rank has for this one; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.exchange_parts(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.exchange_parts(gradient), None


class AllToAllHeads:
    """Attention by `kernel`, of whole samples and some of the heads; C divides N.

    Where C does not divide G, heads of keys and values are repeated until it does.
    """

    def __init__(self, kernel: AttentionKernel, group: TensorGroup) -> None:
        self._kernel, self._group = kernel, group
        self.compiled, self.splits_graphs = kernel.compiled, kernel.splits_graphs
        self.context_ranks = group.size

    def describe(self) -> str:
        """Return the kernel's description for the log."""
        kernel = self._kernel.describe()
        return f"all-to-all of heads among {self.context_ranks} context ranks{kernel and f', {kernel}'}"

    def sent(
        self, heads: int, groups: int, head_width: int, tokens: int, window: int | None
    ) -> tuple[int, int]:
        """Return the elements that a forward and a backward send per token of this rank, of any window."""
        elements = self._to_others(2 * (heads + math.lcm(groups, self.context_ranks)) * head_width)
        return elements, elements

    def sent_behind(self, heads: int, head_width: int) -> int:
        """Return those that a forward sends behind all that its backward needs: the result."""
        return self._to_others(heads * head_width)

    def _to_others(self, elements: int) -> int:
        return elements // self.context_ranks * (self.context_ranks - 1)

    def causal(self, x: Tensor) -> Causal:
        """As the kernel, of whole samples; x (B, S / C, …)."""
        return self._kernel.causal(self._whole(x))

    def sliding_window(self, window: int, x: Tensor) -> SlidingWindow:
        """As `causal`."""
        return self._kernel.sliding_window(window, self._whole(x))

    def documents(self, ends: Tensor, x: Tensor, window: int | None = None) -> InsideDocuments:
        """As `causal`."""
        return self._kernel.documents(ends, self._whole(x), window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """Queries (B, S / C, N, H), keys and values (B, S / C, G, H) -> (B, S / C, N, H)."""
        assert dropout == 0.0, "check_context_ranks refuses it"
        ranks, heads, groups = self.context_ranks, q.shape[2], k.shape[2]
        repeated = math.lcm(groups, ranks)
        if repeated != groups:
            k, v = (part.repeat_interleave(repeated // groups, 2) for part in (k, v))
        parts = [part.unflatten(2, (ranks, -1)).movedim(2, 0) for part in (q, k, v)]
        received = from_parts(Exchange.apply(torch.cat(parts, 3), self._group))  # (B, S, …, H)
        q, k, v = received.split([part.shape[3] for part in parts], 2)
        mixed = self._kernel(q, k, v, dropout, mask, self._own(scores, heads // ranks))  # (B, S, N / C, H)
        returned = Exchange.apply(to_parts(mixed, ranks), self._group)  # (C, B, S / C, N / C, H)
        return returned.movedim(0, 2).flatten(2, 3)

    def _own(self, scores: Scores, heads: int) -> Scores:
        """The scores of this rank's heads, of which there are so many."""
        own = slice(self._group.rank * heads, (self._group.rank + 1) * heads)
        slopes = None if scores.slopes is None else scores.slopes[own]
        return replace(scores, slopes=slopes, sinks=None if scores.sinks is None else scores.sinks[own])

    def _whole(self, x: Tensor) -> Tensor:
        """Something like whole samples, without memory."""
        return x.new_empty(1).expand(len(x), x.shape[1] * self.context_ranks, 1)
