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

from megatron_zpp.model.fp8.kernels.cast import grid, packed, rounded, store_apart
from megatron_zpp.model.fused.loss import row_statistics
from megatron_zpp.model.fused.math import exp2
from megatron_zpp.model.loss import CODE_UNIT, IGNORED

_BLOCK, _ROW_WARPS = 8192, 16  # as in model/fused/loss.py
_GROUPS, _COLUMNS, _WARPS = 16, 64, 4  # of a program: 64 rows, 32 elements a thread


def logits_to_codes(
    logits: Tensor, targets: Tensor, vocab_size: int, rows: Tensor, columns: Tensor
) -> Tensor:
    """See loss.logits_to_codes, for GPUs; C and V are multiples of 16, and logits stay as they are.

    `columns` may be some of the columns of a larger tensor, from a multiple of 16 on.
    """
    tokens, entries = logits.shape
    losses, largest, log2_totals = torch.empty(3, tokens, dtype=torch.float32, device=logits.device).unbind()
    _statistics_kernel[(tokens,)](
        *(logits, targets, losses, largest, log2_totals, entries, vocab_size),
        IGNORED=IGNORED,
        BLOCK=_BLOCK,
        num_warps=_ROW_WARPS,
    )
    _codes_kernel[grid(tokens, entries, _GROUPS, _COLUMNS)](
        *(logits, targets, largest, log2_totals, rows, columns),
        *(tokens, entries, vocab_size, columns.stride(0)),
        UNIT=CODE_UNIT,
        LOG2_UNIT=math.log2(CODE_UNIT),
        IGNORED=IGNORED,
        GROUPS=_GROUPS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return losses.sum()


@triton.jit
def _statistics_kernel(
    logits_ptr,  # (C, V)
    targets_ptr,  # (C)
    losses_ptr,  # (C) fp32, as are the others
    largest_ptr,
    log2_totals_ptr,
    entries,
    vocab_size,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * entries
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        tl.store(largest_ptr + row, 0.0)
        tl.store(log2_totals_ptr + row, 0.0)
    else:
        largest, total = row_statistics(logits_ptr, entries, vocab_size, BLOCK)
        wanted = tl.load(logits_ptr + target).to(tl.float32)
        tl.store(losses_ptr + row, tl.log(total) - (wanted - largest))
        tl.store(largest_ptr + row, largest)
        tl.store(log2_totals_ptr + row, tl.log2(total))


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
    UNIT: tl.constexpr,
    LOG2_UNIT: tl.constexpr,
    IGNORED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """What codes of every fourth row of a tile are rounded from."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    target = tl.load(targets_ptr + row, mask=row < height, other=IGNORED).to(tl.int32)
    largest = tl.load(largest_ptr + row, mask=row < height, other=0.0)
    shift = tl.load(log2_totals_ptr + row, mask=row < height, other=0.0) - LOG2_UNIT
    inside = (row < height)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    counted = inside & (target != IGNORED)[:, None]
    x = tl.load(logits_ptr + at, mask=counted, other=-float("inf")).to(tl.float32)
    x = tl.where((column < vocab_size)[None, :], x, -float("inf"))
    gradient = exp2((x - largest[:, None]) * LOG2_E - shift[:, None])
    gradient = tl.where(column[None, :] == target[:, None], gradient - UNIT, gradient)
    tl.store(by_rows_ptr + at, rounded(gradient, FORMAT), mask=inside)
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
    vocab_size,
    stride,
    UNIT: tl.constexpr,
    LOG2_UNIT: tl.constexpr,
    IGNORED: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = 4 * group
    FORMAT: tl.constexpr = by_rows_ptr.dtype.element_ty
    # fmt: off
    a = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row, column, height, width,
        vocab_size, UNIT, LOG2_UNIT, IGNORED, FORMAT,
    )
    b = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row + 1, column, height, width,
        vocab_size, UNIT, LOG2_UNIT, IGNORED, FORMAT,
    )
    c = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row + 2, column, height, width,
        vocab_size, UNIT, LOG2_UNIT, IGNORED, FORMAT,
    )
    d = _row(
        logits_ptr, targets_ptr, largest_ptr, log2_totals_ptr, by_rows_ptr, row + 3, column, height, width,
        vocab_size, UNIT, LOG2_UNIT, IGNORED, FORMAT,
    )
    # fmt: on
    words = packed(a, b, c, d, FORMAT)
    store_apart(by_columns_ptr, words, group, column, height, width, stride)
