"""The kernels of causal attention, whole or inside documents, and which of them a run takes.

Shapes: B batch, T tokens, N query heads, G heads of keys and values (G divides N), H head width, E ends of
documents.

A kernel takes one of the masks of model/masks.py. Documents come as the positions of their ends: 0, where
each next document begins among the B · T tokens of a micro-batch, and B · T, repeated until there are E. A
kernel turns them into its `InsideDocuments` once per forward pass, for all layers.
"""

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import product
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zpp.config.options import option_error
from megatron_zpp.model.masks import CAUSAL, CachedPrefix, Causal, InsideDocuments, Mask, SlidingWindow
from megatron_zpp.model.scores import PLAIN_SCORES, Scores, attend

FLAG = "--attention-backend"
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


class AttentionKernel(Protocol):
    """What computes attention, and makes the masks that it takes, for texts like x (B, T, …).

    compiled        whether torch.compile makes the kernel, so that one trial tells that it runs
    splits_graphs   whether torch.compile leaves the kernel as it is, between two graphs
    context_ranks   ranks that have T tokens each of every sample
    """

    compiled: bool
    splits_graphs: bool
    context_ranks: int

    def describe(self) -> str:
        """Return the kernel's description for the log."""

    def causal(self, x: Tensor) -> Causal:
        """The mask of whole samples."""

    def sliding_window(self, window: int, x: Tensor) -> SlidingWindow:
        """The same with a window, of fewer tokens than a sample."""

    def documents(self, ends: Tensor, x: Tensor, window: int | None = None) -> InsideDocuments:
        """The mask inside documents, whose ends (E) are places among the tokens of whole samples."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """Queries (B, T, N, H), keys and values (B, T, G, H) -> (B, T, N, H)."""


class DotProduct:
    """torch's scaled_dot_product_attention by one backend, or by its choice; documents as a dense mask.

    Scores that it cannot make are in memory, as the mask is.
    """

    compiled = splits_graphs = False
    context_ranks = 1

    def __init__(self, backend: str | None = None, remark: str = "") -> None:
        self.backend, self.remark = TORCH_BACKENDS[backend] if backend else None, remark

    def describe(self) -> str:
        """Return the kernel's description for the log; empty for torch's choice without documents."""
        name = self.backend.name.lower() if self.backend else "torch's choice" if self.remark else ""
        return f"{name}{self.remark}"

    def causal(self, x: Tensor) -> Causal:
        """Its kernels know this mask."""
        return CAUSAL

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

    def documents(self, ends: Tensor, x: Tensor, window: int | None = None) -> InsideDocuments:
        """The ends as they are."""
        return InsideDocuments(ends, window)

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


class FlashAttention3:
    """Dao's flash_attn_interface, for Hopper."""

    compiled, splits_graphs = False, True
    context_ranks = 1

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

        self._attend = torch.compiler.disable(flash_attn_func)
        self._attend_documents = torch.compiler.disable(flash_attn_varlen_func)

    def describe(self) -> str:
        """Return the kernel's description for the log."""
        return "flash_attention_3"

    def causal(self, x: Tensor) -> Causal:
        """Its kernel knows this mask."""
        return CAUSAL

    def sliding_window(self, window: int, x: Tensor) -> SlidingWindow:
        """Its kernel takes the number."""
        return SlidingWindow(window)

    def documents(self, ends: Tensor, x: Tensor, window: int | None = None) -> InsideDocuments:
        """The ends as they are."""
        return InsideDocuments(ends, window)

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


def choose_attention(
    backend: str,
    *,
    masked: bool,
    windowed: bool = False,
    scored: str = "",
    head_width: int,
    dropout: float,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionKernel:
    """The kernel of --attention-backend.

    `masked` says that documents will come (--reset-attention-mask), `windowed` that layers have windows.
    `scored` is a flag for which scores are more than scaled, if there is one.

    Raises ValueError where it is known without trying that a backend that was asked for cannot serve.
    """
    no_flex = _no_flex(head_width, dropout, device)
    if backend == "flex":
        if no_flex:
            raise option_error(FLAG, "flex", f"{no_flex}; use auto")
        return _flex()
    on_gpu, memory = device.type == "cuda", TORCH_BACKENDS.get(backend) is SDPBackend.MATH
    if scored and not memory:
        check_scores(backend, scored)
        if not no_flex:
            return _flex()
        remark = f", {scored} through scores in memory; FlexAttention {no_flex}" if on_gpu else ""
        return DotProduct("math", remark)
    if backend == "flash3":
        _check_flash3(dropout, dtype, device)
        return FlashAttention3()
    if (masked or windowed) and on_gpu and backend in ("auto", "flash"):
        hindrance = _no_packed_flash(head_width, dropout, dtype, device, windowed)
        if not hindrance:
            what = "over documents end to end" if masked else "in windows"
            return PackedFlash("flash" if backend == "flash" else None, what)
        if backend == "flash":
            raise no_masks(hindrance, masked=masked)
        if not no_flex:
            return _flex()
        what = "documents" if masked else "windows"
        return DotProduct(remark=f", {what} through a dense mask; flash attention {hindrance}")
    # On Hopper GPUs torch takes cuDNN's, the fastest that comes with torch.
    return DotProduct(None if backend == "auto" else backend)


def _flex() -> DotProduct:
    from megatron_zpp.model.flex import Flex

    return Flex()


def check_runs(
    kernel: AttentionKernel,
    backend: str,
    lengths: Iterable[int],
    *,
    masked: bool,
    windows: Iterable[int | None] = (None,),
    head_width: int,
    queries_per_group: int = 1,
    scores: Scores = PLAIN_SCORES,
    dropout: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run the heads of one query group forward and backward on the device, for each length and window.

    Raises ValueError, in one line, where torch has no such kernel.
    """
    for tokens, window in product(lengths, windows):
        shape = 1, tokens, queries_per_group + 2, head_width
        x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of each kernel that is not to be used anyway
                mask = mask_of(kernel, x, window, ends if masked else None)
                q, k, v = x.split([queries_per_group, 1, 1], 2)
                # Not backward(gradient), which imports sympy, nor that of a mere sum, which has no strides.
                (kernel(q, k, v, dropout, mask, scores) * torch.ones_like(q)).sum().backward()
        except RuntimeError as error:
            case = f"{tokens} tokens, --kv-channels {head_width}, --attention-dropout {dropout}"
            masks = ", --reset-attention-mask" if masked else ""
            masks += f", --window-size {window - 1},0" if window else ""
            name = str(dtype).removeprefix("torch.")
            reason = str(error).strip().splitlines()[0]
            raise option_error(
                FLAG,
                backend,
                f"cannot compute {case}{masks} in {name} on this {device.type} ({reason}); use another",
            ) from None


def mask_of(kernel: AttentionKernel, x: Tensor, window: int | None, documents: Tensor | None) -> Mask:
    """The mask of layers with this window for texts like x (B, T, …): inside documents (E), or causal."""
    if documents is not None:
        return kernel.documents(documents, x, window)
    if window is None or x.shape[1] * kernel.context_ranks <= window:
        return kernel.causal(x)
    return kernel.sliding_window(window, x)


def _newest(tokens: int, window: int, device: torch.device) -> Tensor:
    """Return where each token attends to itself and to those before it inside a window: (T, T)."""
    places = torch.arange(tokens, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def _reach(window: int | None) -> tuple[int, int]:
    """Return flash attention's window: the tokens before a token and after it, -1 for all."""
    return (-1 if window is None else window - 1), 0


def _check_flash3(dropout: float, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        raise option_error(FLAG, "flash3", f"its kernels need a Hopper GPU; on the {device.type} use auto")
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise option_error(
            FLAG, "flash3", "module flash_attn_interface, of FlashAttention-3, is not installed; use auto"
        )
    check_flash3_settings(dropout, dtype)


def check_flash3_settings(dropout: float, dtype: torch.dtype) -> None:
    """Raises ValueError for what it cannot do on any device."""
    if dropout:
        raise option_error(FLAG, "flash3", f"has no dropout; use --attention-dropout 0 instead of {dropout}")
    if dtype.itemsize != 2:
        raise option_error(FLAG, "flash3", "computes in bf16 and fp16; leave out --fp32, or use auto")


def no_masks(hindrance: str, *, masked: bool) -> ValueError:
    """The error for --attention-backend flash where `hindrance` prevents PackedFlash."""
    cause = "--reset-attention-mask" if masked else "--window-size"
    return option_error(FLAG, "flash", f"with {cause} it {hindrance}, or use auto")


def check_scores(backend: str, scored: str) -> None:
    """Raises ValueError for a backend whose scores on GPUs are only scaled, with the flag `scored`."""
    if backend not in ("auto", "flex") and TORCH_BACKENDS.get(backend) is not SDPBackend.MATH:
        raise option_error(FLAG, backend, f"cannot compute {scored}; use auto, flex or math")


def flex_hindrance(head_width: int, dropout: float) -> str:
    """Return which setting prevents FlexAttention on every GPU, as 'needs …'; empty if none does."""
    if dropout:
        return "needs --attention-dropout 0"
    return "" if head_width >= 16 else f"needs --kv-channels of at least 16, not {head_width}"


def _no_flex(head_width: int, dropout: float, device: torch.device) -> str:
    """Return what is known to prevent FlexAttention on this device, as 'needs …'; empty if nothing is."""
    if device.type != "cuda":
        return "needs a GPU"
    return flex_hindrance(head_width, dropout) or (
        "" if importlib.util.find_spec("triton") else "needs Triton"
    )


def packed_flash_hindrance(head_width: int, dropout: float, dtype: torch.dtype) -> str:
    """Return which setting prevents PackedFlash on every device, as 'needs …'; empty if none does."""
    if dtype.itemsize != 2:
        return "needs --bf16 or --fp16"
    if dropout:
        return "needs --attention-dropout 0"
    if head_width % 8 or head_width > 256:
        return f"needs --kv-channels that are a multiple of 8 up to 256, not {head_width}"
    return ""


def _no_packed_flash(
    head_width: int, dropout: float, dtype: torch.dtype, device: torch.device, windowed: bool
) -> str:
    """Return what prevents PackedFlash on this device, as 'needs …'; empty if nothing does."""
    if hindrance := packed_flash_hindrance(head_width, dropout, dtype):
        return hindrance
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of Ampere or later"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"needs torch 2.10 or later, not {torch.__version__}"
    if windowed:
        from torch.nn.attention.varlen import varlen_attn

        if "window_size" not in inspect.signature(varlen_attn).parameters:
            return f"needs torch 2.11 or later, not {torch.__version__}"
    return ""


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Its older releases also return the logarithms of the sums."""
    return result if isinstance(result, Tensor) else result[0]
