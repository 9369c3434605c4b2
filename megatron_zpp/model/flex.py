"""Attention by torch's FlexAttention, whose kernel torch.compile makes for a model's scores and masks.

Shapes: B batch, T tokens, N query heads, G heads of keys and values, H head width, E ends of documents, Q
blocks of queries, K of keys (as many).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.masks import Mask, first_seen
from megatron_zpp.model.scores import Scores

_BLOCK = 128  # tokens of queries and of keys that a mask shows or hides together
_Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex(DotProduct):
    """FlexAttention for batches; a text that grows token by token has its scores in memory.

    Inside of a compiled layer the kernel is a part of the layer's graph. Elsewhere it is a graph of its own.
    """

    compiled = True

    def __init__(self) -> None:
        super().__init__("math")
        self._outside = torch.compile(flex.flex_attention, fullgraph=True)
        self._known: dict[tuple[int, int | None, torch.device], BlockMask] = {}

    def describe(self) -> str:
        return "flex_attention"

    def bounds(self, x: Tensor, window: int | None, ends: Tensor | None) -> BlockMask:
        """(B, T, …) -> the blocks of keys that each block of queries sees.

        With documents they are those of each row. Others are made once per length and window.
        """
        if ends is not None:
            first = first_seen(_places(x), x.shape[1], window, ends, len(x))

            def inside(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (key <= query) & (key >= first[b, query])

            return _blocks(first, inside)
        key = x.shape[1], window, x.device
        if key not in self._known:
            with torch.inference_mode(False):  # a graph may keep them for a backward
                (of_row,) = first_seen(_places(x), x.shape[1], window)

                def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                    return (key <= query) & (key >= of_row[query])  # no number, which is compiled anew

                self._known[key] = _blocks(of_row[None], near)
        return self._known[key]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        if mask.cached:
            return super().__call__(q, k, v, dropout, mask, scores)
        assert dropout == 0.0, "choose_attention gives it to no run with dropout"
        assert mask.bounds is not None, "a mask of another kernel"
        attend = self._attention(mask.bounds, scores, q.shape[2] != k.shape[2])
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # each (B, N or G, T, H)
        if scores.sinks is None:
            return attend(q, k, v).transpose(1, 2)
        mixed, log_sum = _with_log_sum(attend, q, k, v)  # (B, N, T, H) and (B, N, T)
        # A sink joins the sum of exponentials that the values were divided by.
        share = torch.sigmoid(log_sum - scores.sinks.to(log_sum.dtype)[:, None])
        return (mixed * share[..., None]).to(mixed.dtype).transpose(1, 2)

    def block_mask(self, first: Tensor, shift: int) -> BlockMask:
        """The blocks of T keys that T queries, `shift` tokens after them, see: from `first` (B, T) on."""
        moved = _moved(shift, first.device)

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query + moved) & (key >= first[b, query])

        return _blocks(first, visible, shift)

    def with_log_sum(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, scores: Scores, shift: int
    ) -> tuple[Tensor, Tensor]:
        """Attention without sinks to keys under a `block_mask`, and the logarithms of its sums (B, N, T)."""
        attend = self._attention(blocks, scores, q.shape[2] != k.shape[2], _moved(shift, q.device))
        mixed, log_sum = _with_log_sum(attend, *(part.transpose(1, 2) for part in (q, k, v)))
        return mixed.transpose(1, 2), log_sum

    def _attention(
        self, blocks: BlockMask, scores: Scores, grouped: bool, moved: Tensor | None = None
    ) -> Callable[..., Any]:
        """FlexAttention of queries (B, N, T, H), which are `moved` () tokens after the keys."""
        softcap, slopes = scores.softcap, scores.slopes

        def change(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if slopes is None:
                return score
            distance = key - query if moved is None else key - query - moved
            return score + slopes[h] * distance

        return partial(
            flex.flex_attention if torch.compiler.is_compiling() else self._outside,
            score_mod=None if softcap is None and slopes is None else change,
            block_mask=blocks,
            scale=scores.scale,
            enable_gqa=grouped,
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # the kernel for few queries knows less
        )


def _with_log_sum(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What attention makes, and the logarithms of the sums of its exponentials."""
    if not hasattr(flex, "AuxRequest"):  # before torch 2.9
        return attend(q, k, v, return_lse=True)
    mixed, more = attend(q, k, v, return_aux=flex.AuxRequest(lse=True))
    return mixed, more.lse


def _moved(shift: int, device: torch.device) -> Tensor:
    """`shift` () as a tensor, because a graph would be compiled anew for each number."""
    return torch.full((), shift, dtype=torch.int32, device=device)


def _places(x: Tensor) -> Tensor:
    """Those of T tokens, (T) int32."""
    return torch.arange(x.shape[1], dtype=torch.int32, device=x.device)


def _blocks(first: Tensor, visible: _Visible, shift: int = 0) -> BlockMask:
    """Those where each token attends to all from `first` (B or 1, T), which never falls, up to itself.

    Queries are `shift` tokens after the keys.
    """
    tokens = first.shape[1]
    begins = torch.arange(0, tokens, _BLOCK, device=first.device)  # (Q), or (K)
    lasts = (begins + _BLOCK - 1).clamp(max=tokens - 1)
    seen = (begins <= lasts[:, None] + shift) & (lasts >= first[:, begins, None])  # (B, Q, K): by any query
    # By all queries, all of its keys; a last block that is not full never is.
    whole = (lasts < begins[:, None] + shift) & (begins >= first[:, lasts, None])
    whole &= (begins + _BLOCK <= tokens)[:, None]
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Q, K) -> how many blocks of keys are chosen (B, 1, Q), and all, the chosen first, (B, 1, Q, K)."""
    numbers = chosen[:, None].to(torch.int32)
    order = torch.argsort(numbers, dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), order.to(torch.int32)
