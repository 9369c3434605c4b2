"""The kernels of causal attention, whole or inside documents; model/attention_choice.py chooses one.

Shapes: B batch, T tokens, N query heads, G heads of keys and values (G divides N), H head width, E ends of
documents.

A kernel takes one of the masks of model/masks.py. Documents come as the positions of their ends: 0, where
each next document begins among the B · T tokens of a micro-batch, and B · T, repeated until there are E. A
kernel turns them into its `InsideDocuments` once per forward pass, for all layers.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zpp.model.masks import CAUSAL, CachedPrefix, Causal, InsideDocuments, Mask, SlidingWindow
from megatron_zpp.model.scores import PLAIN_SCORES, Scores, attend

_BOUNDED = (InsideDocuments, SlidingWindow)  # no union: torch 2.8 compiles no `isinstance` with one
TORCH_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    # Megatron-LM's names
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
    "local": SDPBackend.MATH,
}


class AttentionKernel:
    """What computes attention, and makes the masks that it takes, for texts like x (B, T, …).

    compiled        whether torch.compile makes the kernel, so that one trial tells that it runs
    splits_graphs   whether torch.compile leaves the kernel as it is, between two graphs
    context_ranks   ranks that have T tokens each of every sample
    """

    compiled = splits_graphs = False
    context_ranks = 1

    def describe(self) -> str:
        """Return the kernel's description for the log."""
        raise NotImplementedError

    def mask(self, x: Tensor, window: int | None, ends: Tensor | None) -> Mask:
        """The mask of layers with this window: inside documents with `ends` (E), or causal."""
        if ends is not None:
            return self.documents(ends, x, window)
        if window is None or x.shape[1] * self.context_ranks <= window:
            return self.causal(x)
        return self.sliding_window(window, x)

    def causal(self, x: Tensor) -> Causal:
        """The mask of whole samples, for kernels that know it."""
        return CAUSAL

    def sliding_window(self, window: int, x: Tensor) -> SlidingWindow:
        """The same with a window, of fewer tokens than a sample, for kernels that take the number."""
        return SlidingWindow(window)

    def documents(self, ends: Tensor, x: Tensor, window: int | None = None) -> InsideDocuments:
        """The mask inside documents, whose ends (E) are places among the tokens of whole samples."""
        return InsideDocuments(ends, window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """Queries (B, T, N, H), keys and values (B, T, G, H) -> (B, T, N, H)."""
        raise NotImplementedError

    def sent(
        self, heads: int, groups: int, head_width: int, tokens: int, window: int | None
    ) -> tuple[int, int]:
        """Return the elements that a forward and a backward send to context ranks, per token of this one.

        For samples of `tokens`, in a layer with the `window`.
        """
        return 0, 0

    def sent_behind(self, heads: int, head_width: int) -> int:
        """Return those that a forward sends behind all that its backward needs."""
        return 0


class DotProduct(AttentionKernel):
    """torch's scaled_dot_product_attention by one backend, or by its choice; documents as a dense mask.

    Scores that it cannot make are in memory, as the mask is.
    """

    def __init__(self, backend: str | None = None, remark: str = "") -> None:
        self.backend, self.remark = TORCH_BACKENDS[backend] if backend else None, remark

    def describe(self) -> str:
        """Return the kernel's description for the log; empty for torch's choice without documents."""
        name = self.backend.name.lower() if self.backend else "torch's choice" if self.remark else ""
        return f"{name}{self.remark}"

    def sliding_window(self, window: int, x: Tensor) -> SlidingWindow:
        """(B, T, …) -> a mask (1, 1, T, T) in the format of x: 0 where a token attends, or -inf.

        Of a boolean mask the kernels of every layer would make this one again.
        """
        tokens = x.shape[1]
        mask = torch.full((1, 1, tokens, tokens), -torch.inf, dtype=x.dtype, device=x.device)
        return SlidingWindow(window, mask.masked_fill_(_newest(tokens, window, x.device), 0.0))

    def documents(self, ends: Tensor, x: Tensor, window: int | None = None) -> InsideDocuments:
        """(E) int32, (B, T, …) -> a mask (B, 1, T, T), as that of `sliding_window`."""
        batch, tokens = x.shape[:2]
        places = torch.arange(batch * tokens, dtype=ends.dtype, device=ends.device)
        document = torch.bucketize(places, ends, right=True).view(batch, 1, tokens)
        same = document[..., None, :] == document[..., None]  # (B, 1, T, T)
        same &= _newest(tokens, window or tokens, x.device)
        mask = torch.full(same.shape, -torch.inf, dtype=x.dtype, device=x.device)
        return InsideDocuments(mask.masked_fill_(same, 0.0), window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """Queries (B, T, N, H), keys and values (B, T or C, G, H) -> (B, T, N, H)."""
        dense: Tensor | None = None
        causal = True
        if isinstance(mask, _BOUNDED):
            dense, causal = mask.bounds, False
        elif isinstance(mask, CachedPrefix):
            dense, causal = mask.visible, mask.visible is None and q.shape[1] > 1
        if not scores.scaled_only:
            if dense is not None and isinstance(mask, _BOUNDED):
                dense = dense.eq(0)
            return attend(q, k, v, dropout, scores, dense)
        grouped = q.shape[2] != k.shape[2]
        if grouped and q.is_cuda and q.dtype.itemsize > 2:  # the kernels for fp32 know no groups
            k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
            grouped = False
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # each (B, N or G, T, H)
        # In here, as a layer that is recomputed in backward must make the same choice again.
        with sdpa_kernel(self.backend) if self.backend else nullcontext():
            mixed = F.scaled_dot_product_attention(
                *(q, k, v, dense, dropout, causal), scale=scores.scale, enable_gqa=grouped
            )
        return mixed.transpose(1, 2)


class PackedFlash(DotProduct):
    """Documents laid end to end, and windows, through torch's flash attention of variable lengths.

    No kernel looks beyond a document or a window, so its work is that of these alone. Other masks are
    DotProduct's.
    """

    def __init__(self, backend: str | None = None, what: str = "over documents end to end") -> None:
        super().__init__(backend)
        self._what = what
        from torch.nn.attention.varlen import varlen_attn

        self._attend: Callable[..., Any] = varlen_attn  # of one tensor, as nothing else is asked for
        parameters = inspect.signature(varlen_attn).parameters
        self._has_windows = "window_size" in parameters
        self._asks_for_groups = "enable_gqa" in parameters  # before torch 2.12 groups need no word

    def describe(self) -> str:
        """Return the kernel's description for the log."""
        return f"flash_attention {self._what}"

    def sliding_window(self, window: int, x: Tensor) -> SlidingWindow:
        """Rows as documents."""
        batch, tokens = x.shape[:2]
        ends = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)
        return SlidingWindow(window, ends)

    documents = AttentionKernel.documents

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """As DotProduct."""
        if not isinstance(mask, _BOUNDED):
            return super().__call__(q, k, v, dropout, mask, scores)
        assert dropout == 0.0, "choose_attention gives it to no run with dropout"
        batch, tokens = q.shape[:2]
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # (B · T, N, H), and twice (B · T, G, H)
        options: dict[str, Any] = (
            {"window_size": _reach(mask.window)} if self._has_windows else {"is_causal": True}
        )
        if scores.scale is not None:
            options["scale"] = scores.scale
        if self._asks_for_groups:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        mixed = self._attend(q, k, v, mask.bounds, mask.bounds, tokens, tokens, **options)
        return mixed.unflatten(0, (batch, tokens))


class FlashAttention3(AttentionKernel):
    """Dao's flash_attn_interface, for Hopper."""

    splits_graphs = True

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

        self._attend = torch.compiler.disable(flash_attn_func)
        self._attend_documents = torch.compiler.disable(flash_attn_varlen_func)

    def describe(self) -> str:
        """Return the kernel's description for the log."""
        return "flash_attention_3"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """As DotProduct."""
        assert dropout == 0.0, "choose_attention gives it to no run with dropout"
        assert not isinstance(mask, CachedPrefix), "generation takes DotProduct"
        reach = _reach(None if isinstance(mask, Causal) else mask.window)
        if not isinstance(mask, InsideDocuments):
            return _first(self._attend(q, k, v, softmax_scale=scores.scale, causal=True, window_size=reach))
        batch, tokens = q.shape[:2]
        mixed = self._attend_documents(
            *(part.flatten(0, 1) for part in (q, k, v)),
            cu_seqlens_q=mask.bounds,
            cu_seqlens_k=mask.bounds,
            max_seqlen_q=tokens,
            max_seqlen_k=tokens,
            softmax_scale=scores.scale,
            causal=True,
            window_size=reach,
        )
        return _first(mixed).unflatten(0, (batch, tokens))


def _newest(tokens: int, window: int, device: torch.device) -> Tensor:
    """Return where each token attends to itself and to those before it inside a window: (T, T)."""
    places = torch.arange(tokens, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def _reach(window: int | None) -> tuple[int, int]:
    """Return flash attention's window: the tokens before a token and after it, -1 for all."""
    return (-1 if window is None else window - 1), 0


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Its older releases also return the logarithms of the sums."""
    return result if isinstance(result, Tensor) else result[0]
