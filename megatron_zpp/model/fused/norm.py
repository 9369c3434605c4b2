"""LayerNorm or RMSNorm and the residual sum beside it, as operators that torch.compile takes into its graphs.

Shapes: B batch, T tokens, D hidden size, R = B · T rows, P programs of a backward.

The compiler's own backward reads a row's inputs again for the sums over rows. Here it is one pass: the
gradient of the residual path is added where the norm's is computed, and each program keeps its rows' sums.
An RMSNorm has no bias, and its mean () is a tensor without elements.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

from megatron_zpp.model.layer import TORCH_NORMS, WIDE_NORMS, Norm

LARGEST = 16384  # elements of a row, which a program has in registers
_SERVED = (*TORCH_NORMS.values(), *WIDE_NORMS.values())
_ELEMENTS, _PROGRAMS = 6144, 5  # of a backward on a multiprocessor at a time: its registers are full then


def serves(module: nn.Module) -> bool:
    """Return whether kernels can take the place of the module."""
    # Not isinstance: a subclass may compute something else.
    return type(module) in _SERVED and module.get_parameter("weight").numel() <= LARGEST


def norm(
    x: Tensor, module: Norm, added: Tensor | None = None, token: Tensor | None = None, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, T, D) -> a token, and the norm; or x + `added`, and the norm of that.

    The norm has the format of its weights. The token has the shape of x and no contents. It takes the
    gradient of the residual path back: given with `added`, x has its gradient through it.

    `biases`, each (D), have their gradients here: one that `added` has in it, and one that has been added to
    what the sum becomes, which is used nowhere else. Only a LayerNorm takes them.
    """
    given = x if added is None else x.detach()
    total, normed, _, _ = _norm(given, added, token, *settings(module), list(biases))
    return total, normed


def add_normed(x: Tensor, made: Tensor, token: Tensor | None, module: Norm) -> Tensor:
    """x + the norm of what was `made`, (B, T, D); with a `token` x has its gradient through it."""
    total, _, _ = _add_normed(x if token is None else x.detach(), made.contiguous(), token, *settings(module))
    return total


def settings(module: Norm) -> tuple[Tensor, Tensor | None, Any, float]:
    """The weight, the bias, which an RMSNorm lacks, eps, and what is added to the weights."""
    bias = module.bias if isinstance(module, nn.LayerNorm) else None
    return module.weight, bias, module.eps, getattr(module, "offset", 0.0)


@triton_op("megatron_zpp_model::norm", mutates_args={})
def _norm(
    x: Tensor,
    added: Tensor | None,
    token: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    biases: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum with `added`, or without it a token; the norm, the mean and 1 / deviation."""
    adds, width = added is not None, x.shape[-1]
    total = torch.empty_like(x) if adds else without_contents(x)
    normed = torch.empty_like(x, dtype=weight.dtype)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = rstd.new_empty(0) if bias is None else torch.empty_like(rstd)
    # Where there is no sum or no bias another tensor is passed, and not touched.
    wrap_triton(_forward_kernel)[(rstd.numel(),)](
        *(x, x if added is None else added, weight, weight if bias is None else bias, total if adds else x),
        *(normed, mean, rstd, width, eps),
        ADDS=adds,
        CENTRED=bias is not None,
        OFFSET=offset,
        **_shape(width),
    )
    return total, normed, mean, rstd


@triton_op("megatron_zpp_model::add_normed", mutates_args={})
def _add_normed(
    x: Tensor,
    made: Tensor,
    token: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x and the norm of `made`; the mean and 1 / deviation."""
    width = x.shape[-1]
    total = torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = rstd.new_empty(0) if bias is None else torch.empty_like(rstd)
    wrap_triton(_add_normed_kernel)[(rstd.numel(),)](
        *(x, made, weight, weight if bias is None else bias, total, mean, rstd, width, eps),
        CENTRED=bias is not None,
        OFFSET=offset,
        **_shape(width),
    )
    return total, mean, rstd


def without_contents(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the shape of x, and of its format or `dtype`, that only carries a gradient."""
    return x.new_empty(1, dtype=dtype).expand(x.shape)


@triton_op("megatron_zpp_model::norm_backward", mutates_args={})
def _norm_backward(
    of_normed: Tensor,
    of_x: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    offset: float,
    sums: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of x, with `of_x` that it may have otherwise, and of weight and bias (2, D) fp32.

    With one sum (RMSNorm) there is no bias (1, D). With 4 sums those of the gradient of x and of `of_x` along
    the rows come after them (4, D).
    """
    rows, width = rstd.numel(), x.shape[-1]
    shape = _shape(width, fewest=4)  # 8 elements a thread where 16 would leave most warps out
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    programs = min(rows, max(1, min(_ELEMENTS // width, _PROGRAMS)) * processors)
    gradient = torch.empty_like(x)
    parts = torch.empty(programs, sums, width, dtype=torch.float32, device=x.device)
    wrap_triton(_backward_kernel)[(programs,)](
        *(
            of_normed,
            of_normed if of_x is None else of_x,
            x,
            weight,
            mean,
            rstd,
            gradient,
            parts,
            rows,
            width,
        ),
        ADDS=of_x is not None,
        OFFSET=offset,
        SUMS=sums,
        **shape,
    )
    return gradient, parts.sum(0)


def _shape(width: int, fewest: int = 1) -> dict[str, int]:
    """Of a program: 16 elements a thread, as many as two loads of 16 bytes are, or `fewest` warps."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, fewest), 16)}


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    (x, added, _, weight, bias, _, ctx.offset, biases), (total, _, mean, rstd) = inputs, output
    ctx.added = None if added is None else added.dtype
    ctx.save_for_backward(x if added is None else total, weight, mean, rstd)
    ctx.sums = 1 if bias is None else 2 + len(biases)


def gradients(
    ctx: Any, of_total: Tensor, of_normed: Tensor, *_: Tensor
) -> tuple[Tensor | list[Tensor] | None, ...]:
    """Those of `_norm`'s arguments, from the gradients of the sum or token and of the norm."""
    x, weight, mean, rstd = ctx.saved_tensors
    of_x, sums = _norm_backward(
        of_normed.contiguous(), of_total.contiguous(), x, weight, mean, rstd, ctx.offset, ctx.sums
    )
    of_weight, *others = sums.to(weight.dtype).unbind()
    of_bias, of_biases = (others[0], others[1:]) if others else (None, [])
    summands = (of_x, None, None) if ctx.added is None else (None, of_x.to(ctx.added), of_x)
    return *summands, of_weight, of_bias, None, None, of_biases


_norm.register_autograd(gradients, setup_context=_save)


def _save_made(ctx: Any, inputs: tuple, output: tuple) -> None:
    (_, made, token, weight, bias, _, ctx.offset), (_, mean, rstd) = inputs, output
    ctx.save_for_backward(made, weight, mean, rstd)
    ctx.sums, ctx.through_token = 1 if bias is None else 2, token is not None


def _of_add_normed(ctx: Any, of_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """As `gradients`, of `_add_normed`."""
    made, weight, mean, rstd = ctx.saved_tensors
    of_made, sums = _norm_backward(
        of_total.contiguous(), None, made, weight, mean, rstd, ctx.offset, ctx.sums
    )
    of_weight, *others = sums.to(weight.dtype).unbind()
    of_x, of_token = (None, of_total) if ctx.through_token else (of_total, None)
    return of_x, of_made, of_token, of_weight, others[0] if others else None, None, None


_add_normed.register_autograd(_of_add_normed, setup_context=_save_made)


@triton.jit
def normalise(
    x_ptr,  # (R, D), as are added and total
    added_ptr,
    weight_ptr,  # (D), as is bias
    bias_ptr,
    total_ptr,
    mean_ptr,  # (R) fp32, as is rstd
    rstd_ptr,
    row,
    columns,
    width,
    eps,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,  # of the weights
):
    """The norm of a row in fp32; the sum and statistics are stored.

    It returns no place for its caller to store at: torch.compile takes what leads to a place for written, and
    would take all arguments of a call for that.
    """
    inside = columns < width
    at = row * width + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm is of what is kept
    centred = x
    if CENTRED:
        mean = tl.sum(x, axis=0) / width
        centred = tl.where(inside, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    eps = tl.cast(eps, tl.float32)  # torch.compile passes fp64
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0:
        weight += OFFSET
    normed = centred * rstd * weight
    if CENTRED:
        normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(rstd_ptr + row, rstd)
    return normed


@triton.jit
def _forward_kernel(
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    normed_ptr,  # (R, D)
    mean_ptr,
    rstd_ptr,
    width,
    eps,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    # fmt: off
    normed = normalise(
        x_ptr, added_ptr, weight_ptr, bias_ptr, total_ptr, mean_ptr, rstd_ptr, row, columns, width, eps,
        ADDS, CENTRED, OFFSET,
    )
    # fmt: on
    tl.store(normed_ptr + row * width + columns, normed, mask=columns < width)


@triton.jit
def _add_normed_kernel(
    x_ptr,  # (R, D), as are made and total
    made_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    width,
    eps,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * width + columns, columns < width
    # fmt: off
    normed = normalise(
        made_ptr, made_ptr, weight_ptr, bias_ptr, made_ptr, mean_ptr, rstd_ptr, row, columns, width, eps,
        False, CENTRED, OFFSET,
    )
    # fmt: on
    tl.store(total_ptr + at, tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + normed, mask=inside)


@triton.jit
def _backward_kernel(
    of_normed_ptr,  # (R, D), as are of_x, x and gradient
    of_x_ptr,
    x_ptr,
    weight_ptr,  # (D)
    mean_ptr,  # (R) fp32, as is rstd
    rstd_ptr,
    gradient_ptr,
    sums_ptr,  # (P, SUMS, D) fp32
    rows,
    width,
    ADDS: tl.constexpr,  # of_x
    OFFSET: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    stride = tl.full([], width, tl.int64)  # or the largest inputs would not be reached
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    of_before = tl.zeros([BLOCK], tl.float32)
    of_after = tl.zeros([BLOCK], tl.float32)
    at = program * stride + columns
    next_x = tl.load(x_ptr + at, mask=inside, other=0.0)
    next_of_normed = tl.load(of_normed_ptr + at, mask=inside, other=0.0)
    next_of_x = next_of_normed
    if ADDS:
        next_of_x = tl.load(of_x_ptr + at, mask=inside, other=0.0)
    for row in range(program, rows, programs):
        at = row * stride + columns
        x, of_normed, of_x = next_x, next_of_normed, next_of_x
        # The next row is on its way while this one's sums are made.
        following = (row + programs) * stride + columns
        there = columns < tl.where(row + programs < rows, width, 0)
        next_x = tl.load(x_ptr + following, mask=there, other=0.0)
        next_of_normed = tl.load(of_normed_ptr + following, mask=there, other=0.0)
        if ADDS:
            next_of_x = tl.load(of_x_ptr + following, mask=there, other=0.0)
        x, of_normed, of_x = x.to(tl.float32), of_normed.to(tl.float32), of_x.to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)  # no room to keep it
        if OFFSET != 0:
            weight += OFFSET
        rstd = tl.load(rstd_ptr + row)
        normalised = x * rstd
        if SUMS > 1:
            normalised = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        of_weight += of_normed * normalised
        scaled = of_normed * weight
        along = tl.sum(scaled * normalised, axis=0) / width
        if SUMS > 1:
            of_bias += of_normed
            scaled -= tl.sum(scaled, axis=0) / width
        gradient = (scaled - normalised * along) * rstd
        if ADDS:
            gradient += of_x
        tl.store(gradient_ptr + at, gradient, mask=inside)
        if SUMS == 4:
            of_before += gradient
            of_after += of_x
    place = sums_ptr + program * SUMS * width + columns
    tl.store(place, of_weight, mask=inside)
    if SUMS > 1:
        tl.store(place + width, of_bias, mask=inside)
    if SUMS == 4:
        tl.store(place + 2 * width, of_before, mask=inside)
        tl.store(place + 3 * width, of_after, mask=inside)
