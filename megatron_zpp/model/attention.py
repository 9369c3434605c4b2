"""The kernels of causal attention, whole or inside documents; model/attention_choice.py chooses one.

Shapes: B batch, T tokens, N query heads, G heads of keys and values (G divides N), H head width, E ends of
documents.

Documents come as the positions of their ends: 0, where each next document begins among the B · T tokens of a
micro-batch, and B · T, repeated until there are E. A kernel turns them into the bounds of a mask
(model/masks.py) once per forward pass, for all layers.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zpp.model.masks import Mask, first_seen
from megatron_zpp.model.scores import Scores, attend

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
        if ends is None and window is not None and x.shape[1] * self.context_ranks <= window:
            window = None
        return Mask(window, documents=ends is not None, bounds=self.bounds(x, window, ends))

    def bounds(self, x: Tensor, window: int | None, ends: Tensor | None) -> Any:
        """What the kernel reads of a mask beside the number of the window, which is less than a sample's.

        The `ends` (E) of documents, if there are any, are places among the tokens of whole samples.
        """
        return ends

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        """Queries (B, T, N, H), keys and values (B, T, G, H) -> (B, T, N, H)."""
        raise NotImplementedError

    def sent(
        self, heads: int, groups: int, head_width: int, tokens: int, window: int | None
    ) -> tuple[int, int, int]:
        """Return the elements that a forward and a backward send to context ranks, per token of this one.

        For samples of `tokens`, in a layer with the `window`. The third number is that of elements which the
        forward sends behind all that its backward needs.
        """
        return 0, 0, 0


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

    def bounds(self, x: Tensor, window: int | None, ends: Tensor | None) -> Any:
        """(B, T, …) -> (B or 1, 1, T, T) in the format of x: 0 where a token attends, or -inf; None: causal.

        Of a boolean mask the kernels of every layer would make this one again.
        """
        if window is None and ends is None:
            return None
        batch, tokens = x.shape[:2]
        places = torch.arange(tokens, dtype=torch.int32, device=x.device)
        first = first_seen(places, tokens, window, ends, 1 if ends is None else batch)
        seen = ((places <= places[:, None]) & (places >= first[..., None]))[:, None]
        mask = torch.full(seen.shape, -torch.inf, dtype=x.dtype, device=x.device)
        return mask.masked_fill_(seen, 0.0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        """Queries (B, T, N, H), keys and values (B, T or C, G, H) -> (B, T, N, H)."""
        dense: Tensor | None = mask.bounds
        causal = dense is None and not (mask.cached and q.shape[1] == 1)
        if not (scores.softcap is None and scores.slopes is None and scores.sinks is None):
            visible = dense if dense is None or mask.cached else dense.eq(0)
            return attend(q, k, v, dropout, scores, visible)
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
        return f"flash_attention {self._what}"

    def bounds(self, x: Tensor, window: int | None, ends: Tensor | None) -> Tensor | None:
        """The ends of documents, or where there is a window alone, of rows (B + 1); None: causal."""
        if ends is not None or window is None:
            return ends
        batch, tokens = x.shape[:2]
        return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        if mask.cached or mask.bounds is None:
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
        return "flash_attention_3"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores) -> Tensor:
        assert dropout == 0.0, "choose_attention gives it to no run with dropout"
        assert not mask.cached, "generation takes DotProduct"
        reach = _reach(mask.window)
        if not mask.documents:
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


def _reach(window: int | None) -> tuple[int, int]:
    """Return flash attention's window: the tokens before a token and after it, -1 for all."""
    return (-1 if window is None else window - 1), 0


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Its older releases also return the logarithms of the sums."""
    return result if isinstance(result, Tensor) else result[0]
