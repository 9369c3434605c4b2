"""Attention of context ranks by all-to-all of heads (DeepSpeed-Ulysses, 2309.14509).

Shapes: B batch, S tokens of a sample, C context ranks, L = S / 2C tokens of a chunk, N query heads, G heads
of keys and values (G divides N), H head width.

Outside of attention a rank has all heads of S / C tokens, and inside it some heads of all tokens, N / C: one
exchange brings queries, keys and values there, and another one brings the result back. A rank's heads are cut
into parts: queries, keys and values of one, and their gradients, are on their way beside the attention of the
other one.
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
from megatron_zpp.model.scores import PLAIN_SCORES, Scores


def parts_of_heads(groups: int, ranks: int) -> int:
    """Return how many parts the heads of each of `ranks` have: two, if that divides their G / C groups."""
    return math.gcd(2, math.lcm(groups, ranks) // ranks)


class Send(torch.autograd.Function):
    """Start to exchange some tensors at once, from tokens to heads if `to_heads`, for `Receive`.

    Between both layouts each element is copied once before it is sent, and once after. The message to a rank
    has one tensor behind the other, and of each tensor its first chunk (B, L, heads, H) before its last one.
    Gradients go the other way: they are waited for here, and sent by `Receive`.
    """

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, to_heads: bool, *tensors: Tensor) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        ctx.shapes = [_piece(x.shape, group.size, to_heads) for x in tensors]
        return _start(tensors, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, message: Tensor) -> tuple[Any, ...]:
        return None, None, *_received(message, ctx.shapes, ctx.group, not ctx.to_heads)


class Receive(torch.autograd.Function):
    """Wait for the message of a `Send` of tensors like these `shapes`, and return what came."""

    @staticmethod
    def forward(
        ctx: Any, group: TensorGroup, to_heads: bool, shapes: Sequence[torch.Size], message: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _received(message, [_piece(shape, group.size, to_heads) for shape in shapes], group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, _start(gradients, ctx.group, not ctx.to_heads)


def _piece(shape: torch.Size, ranks: int, to_heads: bool) -> torch.Size:
    """(B, S / C, C, heads, H) if `to_heads`, else (B, S, heads, H) -> (C, 2, B, L, heads, H)."""
    tokens = shape[1] // 2 if to_heads else shape[1] // (2 * ranks)
    return torch.Size((ranks, 2, shape[0], tokens, *shape[-2:]))


def _start(tensors: Sequence[Tensor], group: TensorGroup, to_heads: bool) -> Tensor:
    """Each (B, S / C, C, heads, H) if `to_heads`, else (B, S, heads, H) -> the message from all ranks."""
    ranks = group.size
    if to_heads:
        pieces = [x.unflatten(1, (2, -1)).permute(3, 1, 0, 2, 4, 5) for x in tensors]
        return group.start_exchange(torch.cat([piece.flatten(1) for piece in pieces], 1))
    # Of all tensors at once: the compiler would copy what is joined twice.
    chunks = [to_parts(x, ranks) for x in tensors]
    ordered = [each[2 * rank + last] for rank in range(ranks) for each in chunks for last in range(2)]
    return group.start_exchange(torch.cat([chunk.flatten() for chunk in ordered]).view(ranks, -1))


def _received(
    message: Tensor, pieces: Sequence[torch.Size], group: TensorGroup, to_heads: bool
) -> tuple[Tensor, ...]:
    """Each (B, S, heads, H) if `to_heads`, else (B, S / C, C, heads, H)."""
    received = group.wait(message).split([math.prod(piece[1:]) for piece in pieces], 1)
    parts = [x.view(piece) for x, piece in zip(received, pieces, strict=True)]
    if to_heads:
        return tuple(from_parts(part) for part in parts)
    return tuple(part.permute(2, 1, 3, 0, 4, 5).flatten(1, 2) for part in parts)


class AllToAllHeads(AttentionKernel):
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
        """See AttentionKernel; the same for any window."""
        elements = self._to_others(2 * (heads + math.lcm(groups, self.context_ranks)) * head_width)
        return elements, elements

    def sent_behind(self, heads: int, head_width: int) -> int:
        """See AttentionKernel: the result."""
        return self._to_others(heads * head_width)

    def _to_others(self, elements: int) -> int:
        return elements // self.context_ranks * (self.context_ranks - 1)

    def mask(self, x: Tensor, window: int | None, ends: Tensor | None) -> Mask:
        """That of the kernel for whole samples; x (B, S / C, …)."""
        whole = x.new_empty(1).expand(len(x), x.shape[1] * self.context_ranks, 1)  # without memory
        return self._kernel.mask(whole, window, ends)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """Queries (B, S / C, N, H), keys and values (B, S / C, G, H) -> (B, S / C, N, H)."""
        assert dropout == 0.0, "check_context_ranks refuses it"
        ranks, groups = self.context_ranks, k.shape[2]
        repeated, parts = math.lcm(groups, ranks), parts_of_heads(groups, ranks)
        if repeated != groups:
            k, v = (x.repeat_interleave(repeated // groups, 2) for x in (k, v))
        by_part = [x.unflatten(2, (ranks, -1)).chunk(parts, 3) for x in (q, k, v)]
        sent = list(zip(*by_part, strict=True))  # tensors (B, S / C, C, …, H)
        coming = [Send.apply(self._group, True, *each) for each in sent]
        mixed = []
        for part in range(parts):
            q, k, v = Receive.apply(self._group, True, [x.shape for x in sent[part]], coming[part])
            mixed.append(self._kernel(q, k, v, dropout, mask, self._of_part(scores, part, parts)))
        # Only now: a recomputation ends with the last kernel, and would not wait for results that it sends.
        going = [Send.apply(self._group, False, x) for x in mixed]
        returned = [
            Receive.apply(self._group, False, [x.shape], message)[0]
            for x, message in zip(mixed, going, strict=True)
        ]
        return torch.cat(returned, 3).flatten(2, 3)

    def _of_part(self, scores: Scores, part: int, parts: int) -> Scores:
        """The scores of one of the parts of this rank's heads."""

        def own(values: Tensor | None) -> Tensor | None:  # of heads
            if values is None:
                return None
            return values.unflatten(0, (self.context_ranks, parts, -1))[self._group.rank, part]

        return replace(scores, slopes=own(scores.slopes), sinks=own(scores.sinks))
