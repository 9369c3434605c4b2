"""The kernel of --attention-backend: what a run takes, on this machine or on any GPU, and whether it runs."""

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch.nn.attention import SDPBackend

from megatron_zpp.config.options import option_error
from megatron_zpp.model.attention import (
    TORCH_BACKENDS,
    AttentionKernel,
    DotProduct,
    FlashAttention3,
    PackedFlash,
)
from megatron_zpp.model.scores import PLAIN_SCORES, Scores

FLAG = "--attention-backend"


@dataclass(frozen=True)
class Choice:
    """What makes the kernel, and why it is slow.

    `scores` says what keeps scores in memory, and `dense` why masks of documents and windows are dense; each
    is empty if nothing does.
    """

    make: Callable[[], AttentionKernel]
    scores: str = ""
    dense: str = ""


def choose_attention(
    backend: str,
    *,
    masked: bool,
    windowed: bool = False,
    scored: str = "",
    head_width: int,
    dropout: float,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Choice:
    """The kernel of --attention-backend on a device; None: on any GPU that has what kernels need.

    `masked` says that documents will come (--reset-attention-mask), `windowed` that layers have windows.
    `scored` is a flag for which scores are more than scaled, if there is one.

    Raises ValueError where it is known without trying that a backend that was asked for cannot serve.
    """
    on_gpu = device is None or device.type == "cuda"
    bounded = masked or windowed
    no_other = f"{FLAG} {backend} knows no other" if bounded and backend != "auto" else ""
    if TORCH_BACKENDS.get(backend) is SDPBackend.MATH:
        return Choice(partial(DotProduct, backend), f"{FLAG} {backend}", no_other)
    no_flex = _no_flex(head_width, dropout, device)
    if backend == "flex" or scored:
        if backend not in ("auto", "flex"):
            raise option_error(FLAG, backend, f"cannot compute {scored}; use auto, flex or math")
        if not no_flex:
            return Choice(_flex)
        if backend == "flex":
            raise option_error(FLAG, backend, f"{no_flex}; use auto")
        remark = f", {scored} through scores in memory; FlexAttention {no_flex}" if on_gpu else ""
        reason = f"FlexAttention {no_flex}"
        make = partial(DotProduct, "math", remark)
        return Choice(make, f"{scored}, because {reason},", reason if bounded else "")
    if backend == "flash3":
        if hindrance := _no_flash3(dropout, dtype, device):
            raise option_error(FLAG, backend, hindrance)
        return Choice(FlashAttention3)
    # On Hopper GPUs torch takes cuDNN's, the fastest that comes with torch.
    torchs = Choice(partial(DotProduct, None if backend == "auto" else backend), dense=no_other)
    if not bounded or not on_gpu or backend not in ("auto", "flash"):
        return torchs
    hindrance = _no_packed_flash(head_width, dropout, dtype, device, windowed)
    if not hindrance:
        what = "over documents end to end" if masked else "in windows"
        return Choice(partial(PackedFlash, None if backend == "auto" else backend, what))
    if backend == "flash":
        cause = "--reset-attention-mask" if masked else "--window-size"
        raise option_error(FLAG, backend, f"with {cause} it {hindrance}, or use auto")
    if not no_flex:
        return Choice(_flex)
    what, reason = "documents" if masked else "windows", f"flash attention {hindrance}"
    return Choice(partial(DotProduct, None, f", {what} through a dense mask; {reason}"), dense=reason)


def _flex() -> AttentionKernel:
    from megatron_zpp.model.flex import Flex

    return Flex()


def _no_flash3(dropout: float, dtype: torch.dtype, device: torch.device | None) -> str:
    """Return what prevents FlashAttention3, and what to use; empty if nothing does."""
    if device is not None and device.type != "cuda":
        return f"its kernels need a Hopper GPU; on the {device.type} use auto"
    if device is not None and importlib.util.find_spec("flash_attn_interface") is None:
        return "module flash_attn_interface, of FlashAttention-3, is not installed; use auto"
    if dropout:
        return f"has no dropout; use --attention-dropout 0 instead of {dropout}"
    return "" if dtype.itemsize == 2 else "computes in bf16 and fp16; leave out --fp32, or use auto"


def _no_flex(head_width: int, dropout: float, device: torch.device | None) -> str:
    """Return what is known to prevent FlexAttention, as 'needs …'; empty if nothing is."""
    if device is not None and device.type != "cuda":
        return "needs a GPU"
    if dropout:
        return "needs --attention-dropout 0"
    if head_width < 16:
        return f"needs --kv-channels of at least 16, not {head_width}"
    return "needs Triton" if device is not None and importlib.util.find_spec("triton") is None else ""


def _no_packed_flash(
    head_width: int, dropout: float, dtype: torch.dtype, device: torch.device | None, windowed: bool
) -> str:
    """Return what prevents PackedFlash, as 'needs …'; empty if nothing does."""
    if dtype.itemsize != 2:
        return "needs --bf16 or --fp16"
    if dropout:
        return "needs --attention-dropout 0"
    if head_width % 8 or head_width > 256:
        return f"needs --kv-channels that are a multiple of 8 up to 256, not {head_width}"
    if device is None:
        return ""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of Ampere or later"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"needs torch 2.10 or later, not {torch.__version__}"
    if windowed:
        from torch.nn.attention.varlen import varlen_attn

        if "window_size" not in inspect.signature(varlen_attn).parameters:
            return f"needs torch 2.11 or later, not {torch.__version__}"
    return ""


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
                q, k, v = x.split([queries_per_group, 1, 1], 2)
                mixed = kernel(q, k, v, dropout, kernel.mask(x, window, ends if masked else None), scores)
                # Not backward(gradient), which imports sympy, nor that of a mere sum, which has no strides.
                (mixed * torch.ones_like(q)).sum().backward()
        except RuntimeError as error:
            case = f"{tokens} tokens, --kv-channels {head_width}, --attention-dropout {dropout}"
            masks = ", --reset-attention-mask" if masked else ""
            masks += f", --window-size {window - 1},0" if window else ""
            name = str(dtype).removeprefix("torch.")
            reason = str(error).strip().splitlines()[0]
            fix = f"cannot compute {case}{masks} in {name} on this {device.type} ({reason}); use another"
            raise option_error(FLAG, backend, fix) from None
