"""What of the loss with 8-bit products is no product: logits become E5M2 codes of their gradient.

Shapes: C tokens of a chunk, V padded vocabulary. One kernel reads rows of logits for their softmax's
statistics and losses. Another reads tiles, and writes codes by rows and by columns, which are turned as in
model/fp8/kernels/cast.py. Logits of one chunk are read twice, and their gradient is in memory as codes alone.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_zpp.model.fp8.kernels.cast import WARPS, grid, packed, store_turned, tile
from megatron_zpp.model.fused.loss import WARPS as ROW_WARPS
from megatron_zpp.model.fused.loss import arguments, empty_losses, row_statistics
from megatron_zpp.model.fused.math import LOG2_E, exp2, squashed
from megatron_zpp.model.loss import CODE_UNIT, IGNORED, Objective

_UNIT, _LOG2_UNIT = tl.constexpr(CODE_UNIT), tl.constexpr(math.log2(CODE_UNIT))
_IGNORED = tl.constexpr(IGNORED)


def logits_to_codes(
    logits: Tensor, targets: Tensor, objective: Objective, rows: Tensor, columns: Tensor
) -> Tensor:
    """See loss.logits_to_codes, for GPUs; C and V are multiples of 16, and logits stay as they are.

    `columns` may be some of the columns of a larger tensor, from a multiple of 16 on.
    """
    tokens, entries = logits.shape
    losses, given = empty_losses(objective, logits), arguments(objective)
    largest, log2_totals = torch.empty(2, tokens, dtype=torch.float32, device=logits.device).unbind()
    _statistics_kernel[(tokens,)](
        *(logits, targets, losses, largest, log2_totals, entries),
        **given,
        num_warps=ROW_WARPS,
    )
    _codes_kernel[grid(tokens, entries)](
        *(logits, targets, largest, log2_totals, rows, columns),
        *(tokens, entries, columns.stride(0)),
        **given,
        num_warps=WARPS,
    )
    return losses.sum(-1)


@triton.jit
def _statistics_kernel(
    logits_ptr,  # (C, V)
    targets_ptr,  # (C)
    losses_ptr,  # (C) fp32, as are the others; with Z_LOSS (2, C)
    largest_ptr,
    log2_totals_ptr,
    entries,
    vocab_size,
    cap,
    z_coeff,
    CAPPED: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * entries
    target = tl.load(targets_ptr + row)
    if target == _IGNORED:
        tl.store(losses_ptr + row, 0.0)
        tl.store(largest_ptr + row, 0.0)
        tl.store(log2_totals_ptr + row, 0.0)
        if Z_LOSS:
            tl.store(losses_ptr + tl.num_programs(0) + row, 0.0)
    else:
        largest, total = row_statistics(logits_ptr, entries, vocab_size, cap, CAPPED)
        wanted = tl.load(logits_ptr + target).to(tl.float32)
        if CAPPED:
            wanted = cap * squashed(wanted, cap)
        tl.store(losses_ptr + row, tl.log(total) - (wanted - largest))
        tl.store(largest_ptr + row, largest)
        tl.store(log2_totals_ptr + row, tl.log2(total))
        if Z_LOSS:
            log_total = largest + tl.log(total)
            tl.store(losses_ptr + tl.num_programs(0) + row, z_coeff * log_total * log_total)


@triton.jit
def _row(
    logits_ptr,
    targets_ptr,
    largest_ptr,
    log2_totals_ptr,
    by_rows_ptr,
    row,
    column,
    height,
    width,
    vocab_size,
    cap,
    z_coeff,
    CAPPED: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """What codes of every fourth row of a tile are rounded from."""
    target = tl.load(targets_ptr + row, mask=row < height, other=_IGNORED).to(tl.int32)
    largest = tl.load(largest_ptr + row, mask=row < height, other=0.0)
    log2_total = tl.load(log2_totals_ptr + row, mask=row < height, other=0.0)
    shift = log2_total - _LOG2_UNIT
    inside = (row < height)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    counted = inside & (target != _IGNORED)[:, None]
    x = tl.load(logits_ptr + at, mask=counted, other=-float("inf")).to(tl.float32)
    used = (column < vocab_size)[None, :]
    if CAPPED:
        share = squashed(x, cap)
        x = cap * share
        used = used & counted
    x = tl.where(used, x, -float("inf"))
    gradient = exp2((x - largest[:, None]) * LOG2_E - shift[:, None])
    if Z_LOSS:
        LN_2: tl.constexpr = 0.6931471805599453
        gradient *= 1 + 2 * z_coeff * (largest + LN_2 * log2_total)[:, None]
    gradient = tl.where(column[None, :] == target[:, None], gradient - _UNIT, gradient)
    if CAPPED:
        gradient *= 1 - share * share
    tl.store(by_rows_ptr + at, gradient, mask=inside)
    return gradient


@triton.jit
def _codes_kernel(
    logits_ptr,  # (C, V)
    targets_ptr,  # (C)
    largest_ptr,  # (C) fp32, as are the next
    log2_totals_ptr,
    by_rows_ptr,  # (C, V)
    by_columns_ptr,  # V rows of C codes, `stride` apart
    height,
    width,
    stride,
    vocab_size,
    cap,
    z_coeff,
    CAPPED: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    group, column = tile()
    row = 4 * group
    # fmt: off
    a = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row, column, height, width,
        vocab_size, cap, z_coeff, CAPPED, Z_LOSS,
    )
    b = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row + 1, column, height, width,
        vocab_size, cap, z_coeff, CAPPED, Z_LOSS,
    )
    c = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row + 2, column, height, width,
        vocab_size, cap, z_coeff, CAPPED, Z_LOSS,
    )
    d = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row + 3, column, height, width,
        vocab_size, cap, z_coeff, CAPPED, Z_LOSS,
    )
    # fmt: on
    words = packed(a, b, c, d, by_columns_ptr)
    store_turned(by_columns_ptr, words, group, column, height, width, stride)
