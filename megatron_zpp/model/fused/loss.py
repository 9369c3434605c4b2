"""What of the loss is no product, as one kernel: each row of logits is read and becomes its gradient.

Shapes: C tokens of a chunk, V padded vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_zpp.model.fused.math import LOG2_E, exp2, squashed
from megatron_zpp.model.loss import IGNORED, LossKernels, Objective, unit

# The fastest of 2048 to 16384 and 4 to 32 for 50,304 entries on an H200.
_BLOCK, WARPS = tl.constexpr(8192), 16
_IGNORED = tl.constexpr(IGNORED)


def logits_to_gradient(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """See loss.logits_to_gradient, for GPUs: fp32 inside, of a format of at most 32 bits."""
    losses = empty_losses(objective, logits)
    _row_to_gradient[(len(logits),)](
        *(logits, targets, losses, logits.stride(0), logits.shape[1], unit(logits.dtype)),
        **arguments(objective),
        num_warps=WARPS,
    )
    return losses.sum(-1)


def empty_losses(objective: Objective, logits: Tensor) -> Tensor:
    """Room for the cross-entropies (C) of logits (C, V); with a z-loss for these and z-losses, (2, C)."""
    shape = (len(logits),) if objective.z_coeff == 0 else (2, len(logits))
    return torch.empty(shape, dtype=torch.float32, device=logits.device)


def arguments(objective: Objective) -> dict[str, int | float | bool]:
    """The objective as arguments of a kernel."""
    vocab_size, cap, z_coeff = objective
    return {
        "vocab_size": vocab_size,
        "cap": cap or 0.0,
        "z_coeff": z_coeff,
        "CAPPED": cap is not None,
        "Z_LOSS": z_coeff != 0,
    }


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """See loss.scaled, for GPUs: `total` has no gaps."""
    out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    block = 4096
    _scale[(triton.cdiv(total.numel(), block),)](total, factor, out, total.numel(), BLOCK=block, num_warps=8)
    return out


PASSES = LossKernels(logits_to_gradient, scaled, lean=True)


@triton.jit
def _scale(total_ptr, factor_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(total_ptr + at, mask=inside).to(tl.float32)
    tl.store(out_ptr + at, total * tl.load(factor_ptr), mask=inside)


@triton.jit
def row_statistics(logits_ptr, entries, vocab_size, cap, CAPPED: tl.constexpr):
    """The largest of the first `vocab_size` logits of a row, and the sum of exp(logit - largest); fp32."""
    columns = tl.arange(0, _BLOCK)
    largest, sums = -float("inf"), tl.zeros([_BLOCK], tl.float32)
    for start in range(0, vocab_size, _BLOCK):
        here = start + columns
        x = tl.load(logits_ptr + here, mask=here < entries, other=0.0).to(tl.float32)
        if CAPPED:
            x = cap * squashed(x, cap)
        x = tl.where(here < vocab_size, x, -float("inf"))
        now = tl.maximum(largest, tl.max(x, axis=0))
        sums = sums * tl.exp(largest - now) + exp2((x - now) * LOG2_E)
        largest = now
    return largest, tl.sum(sums, axis=0)


@triton.jit
def _row_to_gradient(
    logits_ptr,  # (C, V)
    targets_ptr,  # (C)
    losses_ptr,  # (C) fp32; with Z_LOSS (2, C)
    stride,
    entries,
    unit,
    vocab_size,
    cap,
    z_coeff,
    CAPPED: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, _BLOCK)
    if target == _IGNORED:
        for start in range(0, entries, _BLOCK):
            here = start + columns
            tl.store(logits_ptr + here, tl.zeros([_BLOCK], tl.float32), mask=here < entries)
        tl.store(losses_ptr + row, 0.0)
        if Z_LOSS:
            tl.store(losses_ptr + tl.num_programs(0) + row, 0.0)
    else:
        largest, total = row_statistics(logits_ptr, entries, vocab_size, cap, CAPPED)
        wanted = tl.load(logits_ptr + target).to(tl.float32)
        if CAPPED:
            wanted_share = squashed(wanted, cap)
            of_wanted = 1 - wanted_share * wanted_share
            wanted = cap * wanted_share
        likelihood = wanted - largest - tl.log(total)
        of_target = tl.exp(likelihood) - 1
        tl.store(losses_ptr + row, -likelihood)
        if Z_LOSS:
            log_total = largest + tl.log(total)
            more = 2 * z_coeff * log_total
            of_target += more * tl.exp(likelihood)
            tl.store(losses_ptr + tl.num_programs(0) + row, z_coeff * log_total * log_total)
        if CAPPED:
            of_target *= of_wanted
        tl.debug_barrier()  # another thread may be the one that overwrites the target's logit
        shift = tl.log2(total / unit)
        for start in range(0, entries, _BLOCK):
            here = start + columns
            x = tl.load(logits_ptr + here, mask=here < entries, other=0.0).to(tl.float32)
            if CAPPED:
                share = squashed(x, cap)
                x = cap * share
            x = tl.where(here < vocab_size, x, -float("inf"))
            gradient = exp2((x - largest) * LOG2_E - shift)
            if Z_LOSS:
                gradient *= 1 + more
            if CAPPED:
                gradient *= 1 - share * share
            tl.store(logits_ptr + here, gradient, mask=here < entries)
        tl.debug_barrier()
        tl.store(logits_ptr + target, of_target * unit)
