"""The output layer with the mean cross-entropy behind it, without the fp32 logits of all tokens in memory.

Shapes: N tokens, C tokens of a chunk, D hidden size, V padded vocabulary.

Only a chunk has logits and their fp32 softmax at a time. In a forward that a backward will follow, their
gradient takes their place at once, so no product is made twice. What waits for the backward is one of

    the gradient of the logits (N, V) in the compute format: both products with it are the backward's, or
    the sums of those products, (N, D) and (V, D), in fp32: the backward scales them

The first grows with the tokens and the second does not: `keeps_gradient` chooses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # a token with this target does not count: F.cross_entropy's default
CHUNK_BYTES = 512 * 2**20  # of a chunk's fp32 logits: large products, and little beside a model
LEAN_CHUNK_BYTES = 2**30  # the same where there are no fp32 logits, only those of the compute format
CODE_UNIT = 2.0**15  # the code of a gradient of 1: docs/internals/numerics.md has the reasons

# Whether addmm adds a product of 16-bit factors to fp32 sums.
_ADDS_WIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


class Objective(NamedTuple):
    """What becomes of logits, and what is minimised.

    Columns from `vocab_size` on only pad the vocabulary: they take no part and have no gradient. The others
    become C · tanh(logits / C) with a `cap` C (Gemma 2). In training the z-loss, `z_coeff` times the mean of
    log² of the softmax's denominators (PaLM, 5), is added to the mean cross-entropy.
    """

    vocab_size: int
    cap: float | None = None
    z_coeff: float = 0.0


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits with a soft cap, see `Objective`, in their format."""
    return logits if cap is None else wide_logits(logits, cap).to(logits.dtype)


def wide_logits(logits: Tensor, cap: float | None) -> Tensor:
    """The same in the format of losses."""
    return logits.to(wide(logits.dtype)) if cap is None else _squashed(logits, cap) * cap


def slope(logits: Tensor, cap: float) -> Tensor:
    """The derivative of `wide_logits`, in the format of losses. It cannot be differentiated."""
    return _squashed(logits, cap).square_().neg_().add_(1)


def _squashed(logits: Tensor, cap: float) -> Tensor:
    return logits.to(wide(logits.dtype), copy=True).div_(cap).tanh_()


def z_terms(log_totals: Tensor, z_coeff: float) -> tuple[Tensor, Tensor]:
    """The z-loss of each token, and its derivative by the logarithm of the softmax's denominator."""
    return z_coeff * log_totals * log_totals, 2 * z_coeff * log_totals


def logits_to_gradient(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """The sum of the losses of logits (C, V), whose place their gradient times `unit` takes.

    That is the sum of cross-entropies (), with a z-loss the sums of both (2,). All of a chunk that is not a
    product, and nothing but its arguments: torch.compile can make one kernel of it. fp32 inside whatever the
    format.
    """
    cap, z_coeff = objective.cap, objective.z_coeff
    used = wide_logits(logits, cap)
    used[:, objective.vocab_size :] = -math.inf
    log_softmax = torch.log_softmax(used, dim=1)  # (C, V)
    del used
    counted = (targets != IGNORED)[:, None]  # (C, 1)
    place = targets.clamp(min=0)[:, None]
    likelihood = log_softmax.gather(1, place)  # (C, 1)
    loss = -torch.where(counted, likelihood, 0.0).sum()
    scale = unit(logits.dtype)
    if scale != 1:
        log_softmax.add_(math.log(scale))
    of_target = scale * torch.expm1(likelihood)  # softmax less one
    if cap is None and z_coeff == 0:
        torch.exp(log_softmax, out=logits)
        logits.scatter_(1, place, of_target.to(logits.dtype))
        logits.mul_(counted)
        return loss
    gradient = log_softmax.exp_()
    if z_coeff != 0:
        log_total = wide_logits(logits.gather(1, place), cap) - likelihood  # (C, 1)
        z_loss, more = z_terms(log_total, z_coeff)
        loss = torch.stack((loss, torch.where(counted, z_loss, 0.0).sum()))
        of_target += scale * more * torch.exp(likelihood)
        gradient.mul_(1 + more)
    gradient.scatter_(1, place, of_target).mul_(counted)
    logits.copy_(gradient if cap is None else gradient.mul_(slope(logits, cap)))
    return loss


def logits_to_codes(
    logits: Tensor,
    targets: Tensor,
    objective: Objective,
    rows: Tensor,
    columns: Tensor,
    to_gradient: Callable[[Tensor, Tensor, Objective], Tensor] = logits_to_gradient,
) -> Tensor:
    """The same sum; the gradient times CODE_UNIT is written as E5M2 codes, to rows (C, V) and columns (V, C).

    The logits are lost.
    """
    exact = logits.float()
    total = to_gradient(exact, targets, objective)
    rows.copy_(exact.mul_(CODE_UNIT))
    columns.copy_(rows.t())
    return total


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix `total` times a scalar, rounded once; in its place where that is possible."""
    out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    return torch.mul(total, factor.view(1, 1), out=out)  # with dims, or a 16-bit product would round it


def cross_entropies(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """The sum of the cross-entropies of logits (C, V), where no gradient is wanted."""
    used = wide_logits(logits[:, : objective.vocab_size], objective.cap)
    return F.cross_entropy(used, targets, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class LossKernels:
    """The parts of the loss that are not matrix products, as functions of their arguments alone."""

    to_gradient: Callable[[Tensor, Tensor, Objective], Tensor] = logits_to_gradient
    scaled: Callable[[Tensor, Tensor, torch.dtype], Tensor] = scaled
    lean: bool = False  # whether `to_gradient` makes no fp32 logits
    loss: Callable[[Tensor, Tensor, Objective], Tensor] = cross_entropies
    to_codes: Callable[[Tensor, Tensor, Objective, Tensor, Tensor], Tensor] = logits_to_codes


PLAIN = LossKernels()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    objective: Objective,
    *,
    chunk_bytes: int | None = None,
    passes: LossKernels = PLAIN,
) -> Tensor:
    """F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets), the `objective` in fp32.

    x (N, D) and weight (V, D) are of one format, targets (N) ids or IGNORED: the mean is over the others, and
    0 where there are none. float64 stays float64. The result can be differentiated once. A chunk is as many
    tokens as have `chunk_bytes` of fp32 logits, by default `default_chunk_bytes`.

    Where gradients are wanted, an objective with a z-loss has both losses (2,) as its result. The gradient of
    the first one is that of their sum then, so that what is reported stays the cross-entropy.
    """
    entries, width = weight.shape
    chunk_bytes = chunk_bytes or default_chunk_bytes(entries, width, x.element_size(), lean=passes.lean)
    arguments = x, weight, targets, objective, chunk_bytes, passes
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(*arguments)
    return _loss_alone(*arguments)


def default_chunk_bytes(entries: int, width: int, itemsize: int, *, lean: bool) -> int:
    """Return the bytes of a chunk's logits if they were fp32.

    Each chunk reads and writes the fp32 sums (V, D). So where a chunk has only logits of the compute format
    (`lean`), it may have as many bytes of them as those sums have.
    """
    return max(LEAN_CHUNK_BYTES, 4 * entries * 4 * width // itemsize) if lean else CHUNK_BYTES


def chunk_rows(tokens: int, entries: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Tokens of a chunk: as few chunks as may be, equal ones if fewer than twice as many can be equal."""
    most = max(1, chunk_bytes // (4 * entries))
    fewest = max(1, -(-tokens // most))
    equal = (chunks for chunks in range(fewest, 2 * fewest) if tokens % chunks == 0)
    return max(1, -(-tokens // next(equal, fewest)))


def slices(count: int, rows: int) -> list[slice]:
    """Chunks of `rows` of so many tokens; the last one may be smaller."""
    return [slice(first, first + rows) for first in range(0, count, rows)]


def keeps_gradient(tokens: int, width: int, itemsize: int) -> bool:
    """Return whether the gradient of the logits is kept for the backward, and not the fp32 sums.

    It may be twice as large as these: whole products are faster than sums of parts, which are read and
    written for each, and the backward makes another (V, D) of such sums.
    """
    return tokens * itemsize <= 2 * 4 * width


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format of losses and sums."""
    return torch.promote_types(dtype, torch.float32)


def unit(dtype: torch.dtype) -> float:
    """Return the stored value of a gradient of 1: fp16 could not hold small ones.

    None is above 1, or with a z-loss above 1 + 2 · z_coeff · log of the denominator; there is room for 1.99.
    """
    return 2.0**15 if dtype == torch.float16 else 1.0


def _loss_alone(
    x: Tensor, weight: Tensor, targets: Tensor, objective: Objective, chunk_bytes: int, passes: LossKernels
) -> Tensor:
    total, counted = zero_loss(x), number_counted(targets)
    rows = chunk_rows(len(x), len(weight), chunk_bytes)
    for part, wanted in zip(x.split(rows), targets.split(rows), strict=True):
        total += passes.loss(F.linear(part, weight), wanted, objective)
    return total / counted


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        objective: Objective,
        chunk_bytes: int,
        passes: LossKernels,
    ) -> Tensor:
        total, counted = zero_loss(x, objective), number_counted(targets)
        rows = chunk_rows(len(x), len(weight), chunk_bytes)
        tokens, width = x.shape
        ctx.keeps, ctx.rows, ctx.scaled = keeps_gradient(tokens, width, x.element_size()), rows, passes.scaled
        chunks = zip(x.split(rows), targets.split(rows), strict=True)
        if ctx.keeps:
            gradient = x.new_empty(tokens, len(weight))  # (N, V)
            for (part, wanted), logits in zip(chunks, gradient.split(rows), strict=True):
                torch.mm(part, weight.T, out=logits)
                total += passes.to_gradient(logits, wanted, objective)
            ctx.save_for_backward(counted, x, weight, gradient)
            return total / counted
        of_x, of_weight = (
            torch.empty_like(each, dtype=total.dtype) if needed else None
            for each, needed in zip((x, weight), ctx.needs_input_grad, strict=False)
        )
        for index, (part, wanted) in enumerate(chunks):
            logits = torch.mm(part, weight.T)  # (C, V)
            total += passes.to_gradient(logits, wanted, objective)
            if of_x is not None:
                add_product(logits, weight, of_x[index * rows :][: len(part)], begins=True)
            if of_weight is not None:
                add_product(logits.T, part, of_weight, begins=index == 0)
            del logits  # before there are those of the next chunk
        ctx.formats = x.dtype, weight.dtype
        ctx.save_for_backward(counted, of_x, of_weight)
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: Tensor) -> tuple[Tensor | None, ...]:
        of_loss = of_cross_entropy(of_losses)
        if not ctx.keeps:
            counted, *sums = ctx.saved_tensors
            of_sums = [
                None if one is None else ctx.scaled(one, of_loss / (counted * unit(dtype)), dtype)
                for one, dtype in zip(sums, ctx.formats, strict=True)
            ]
            return *of_sums, None, None, None, None
        counted, x, weight, gradient = ctx.saved_tensors
        factor = of_loss / (counted * unit(x.dtype))
        of_x = of_weight = None
        narrow = x.dtype == torch.float16  # in which x times a small factor would be lost
        if narrow:
            for part in gradient.split(ctx.rows):
                ctx.scaled(part, factor, x.dtype)  # torch refuses a second backward: it has changed
        if ctx.needs_input_grad[1]:
            # Otherwise x and its gradient take the factor: passes over (N, D) in place of one over (N, V).
            of_weight = torch.mm(gradient.T, x if narrow else times(x, factor))
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(gradient, weight)
            of_x = of_x if narrow else ctx.scaled(of_x, factor, x.dtype)
        return of_x, of_weight, None, None, None, None


def add_product(a: Tensor, b: Tensor, total: Tensor, *, begins: bool) -> None:
    """Adds a @ b to `total`, or begins it; not rounded to the format of a and b in between."""
    if a.is_cuda and a.dtype != total.dtype:
        if begins:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        elif _ADDS_WIDE:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total.add_(torch.mm(a, b, out_dtype=total.dtype))
        return
    torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=0 if begins else 1, out=total)


def times(x: Tensor, factor: Tensor) -> Tensor:
    """x times a scalar, rounded once."""
    return torch.mul(x, factor.view(1, 1), out=torch.empty_like(x))


def zero_loss(x: Tensor, objective: Objective | None = None) -> Tensor:
    """The sum of no losses of logits in the format of x; without an objective, of cross-entropies alone."""
    shape = () if objective is None or objective.z_coeff == 0 else (2,)
    return torch.zeros(shape, dtype=wide(x.dtype), device=x.device)


def of_cross_entropy(of_losses: Tensor) -> Tensor:
    """The gradient () of the first of the losses, () or (2,), whose own gradient is that of their sum."""
    return of_losses if of_losses.dim() == 0 else of_losses[0]


def number_counted(targets: Tensor) -> Tensor:
    """How many targets count, at least 1: what the sum of cross-entropies is divided by."""
    return (targets != IGNORED).sum().clamp(min=1)
