"""The output layer with the mean cross-entropy behind it, whose three products take 8-bit floats.

Shapes: N tokens, P tokens of a part, C tokens of a chunk, D hidden size, V padded vocabulary; N, D and V are
multiples of 16.

As model/loss.py: only a chunk has logits at a time, of the compute format, and a forward that a backward will
follow makes their gradient from them. Hidden states and table are E4M3 codes with delayed scales. The
gradient of the logits is E5M2 codes: by rows for the gradient of the hidden states, which is made at once,
and by columns, which wait for the gradient of the table:

    one part     the codes (V, N) wait for the backward, whose product of all tokens has the table's format
    more parts   the product of each part is added to fp32 sums (V, D), which the backward scales

A part has at most 8 · D tokens, so that its codes have at most twice the bytes of such sums.

The gradient of the logits has a constant scale, `CODE_UNIT`, and no history: docs/internals/numerics.md says
why. Up to 1.75 has room: a z-loss multiplies softmax by a little more than 1.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.model.fp8.cast import FORMATS, GRADIENT, INPUT, WEIGHT, Cast
from megatron_zpp.model.fp8.delayed import DelayedProduct, coded, multiply
from megatron_zpp.model.loss import (
    CODE_UNIT,
    PLAIN,
    LossKernels,
    Objective,
    chunk_rows,
    default_chunk_bytes,
    number_counted,
    of_cross_entropy,
    slices,
    times,
    zero_loss,
)

_MULTIPLE = 16  # of the sizes of an 8-bit product


class OutputProduct(DelayedProduct):
    """Scales of hidden states and table, and the loss of their product; that of gradients is not used.

    A table is not held as codes: one that is tied is looked up in 16 bits.
    """

    holds_codes = False

    def loss(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        objective: Objective,
        *,
        chunk_bytes: int | None = None,
        passes: LossKernels = PLAIN,
    ) -> Tensor:
        """As loss.linear_cross_entropy, of x (N, D), weight (V, D) in fp32 or bf16 and targets (N)."""
        entries, width = weight.shape
        chunk_bytes = chunk_bytes or default_chunk_bytes(entries, width, x.element_size(), lean=passes.lean)
        layer = _Layer(targets, objective, chunk_bytes, self.factors, self.maxima, self.cast, passes)
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return _CodedCrossEntropy.apply(x, weight, layer)
        return _loss_alone(x, weight, layer)


def part_rows(tokens: int, width: int) -> int:
    """Tokens of a part: as few parts as may be."""
    most = 8 * width
    return _rounded_up(-(-tokens // max(1, -(-tokens // most))))


def coded_chunk_rows(tokens: int, entries: int, chunk_bytes: int) -> int:
    """As loss.chunk_rows, for the tokens of a part: multiples of 16."""
    return _rounded_up(chunk_rows(tokens, entries, chunk_bytes))


class _Layer(NamedTuple):
    """Everything but hidden states and table."""

    targets: Tensor  # (N)
    objective: Objective
    chunk_bytes: int
    factors: Tensor | None  # see model/fp8/cast.py
    maxima: Tensor
    cast: Cast
    passes: LossKernels

    def coded(self, x: Tensor, kind: int, *, columns: bool) -> "_Codes":
        """Codes of a tensor by rows, and perhaps by columns."""
        return _Codes(*coded(self.cast, x, self.factors, self.maxima, kind, rows=True, columns=columns))


class _Codes(NamedTuple):
    """Codes of (R, W) by rows and by columns (W, R), and the number (1) that gives the tensor back."""

    rows: Tensor
    columns: Tensor
    scale: Tensor


def _loss_alone(x: Tensor, weight: Tensor, layer: _Layer) -> Tensor:
    total, targets = zero_loss(x), layer.targets
    codes, table = layer.coded(x, INPUT, columns=False), layer.coded(weight, WEIGHT, columns=False)
    for part in slices(len(x), coded_chunk_rows(len(x), len(weight), layer.chunk_bytes)):
        logits = _logits(codes, table, part, x.dtype)
        total += layer.passes.loss(logits, targets[part], layer.objective)
    return total / number_counted(targets)


class _CodedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Layer) -> Tensor:
        total, counted = zero_loss(x, layer.objective), number_counted(layer.targets)
        table = layer.coded(weight, WEIGHT, columns=True)
        of_x, back = torch.empty_like(x), table.scale.new_full((1,), 1 / CODE_UNIT)
        rows = part_rows(*x.shape)
        ctx.format, ctx.scaled, ctx.sums = weight.dtype, layer.passes.scaled, rows < len(x)
        kept: tuple[Tensor, ...] = ()
        for part in slices(len(x), rows):
            codes = layer.coded(x[part], INPUT, columns=True)
            gradient = _gradient(codes, table, layer, part, back, of_x[part], total)  # (V, P)
            if ctx.sums:
                product = multiply(gradient, codes.columns.t(), back, codes.scale, torch.float32)
                kept = (kept[0].add_(product) if kept else product,)
                del product, gradient  # before there are those of the next part
            else:
                kept = back, gradient, codes.columns, codes.scale
        ctx.save_for_backward(counted, of_x, *kept)
        return total / counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: Tensor) -> tuple[Tensor | None, ...]:
        counted, of_x, *kept = ctx.saved_tensors
        factor, wanted = of_cross_entropy(of_losses) / counted, ctx.needs_input_grad
        of_weight = None
        if wanted[1] and ctx.sums:
            of_weight = ctx.scaled(kept[0], factor, ctx.format)
        elif wanted[1]:
            back, gradient, columns, scale = kept
            of_weight = multiply(gradient, columns.t(), factor * back, scale, ctx.format)
        return times(of_x, factor) if wanted[0] else None, of_weight, None


def _gradient(
    codes: _Codes, table: _Codes, layer: _Layer, part: slice, back: Tensor, of_x: Tensor, total: Tensor
) -> Tensor:
    """The codes of the gradient of a part's logits, by columns (V, P).

    `of_x` (P, D) becomes the gradient of the part's hidden states before the factor of the loss, and `total`
    grows by the losses.
    """
    (tokens, _), entries, targets = of_x.shape, len(table.rows), layer.targets[part]
    columns = codes.rows.new_empty((entries, tokens), dtype=FORMATS[GRADIENT])
    for chunk in slices(tokens, coded_chunk_rows(tokens, entries, layer.chunk_bytes)):
        logits = _logits(codes, table, chunk, of_x.dtype)  # (C, V)
        rows = columns.new_empty(logits.shape)
        total += layer.passes.to_codes(logits, targets[chunk], layer.objective, rows, columns[:, chunk])
        del logits
        of_x[chunk] = multiply(rows, table.columns.t(), back, table.scale, of_x.dtype)
        del rows  # before there are those of the next chunk
    return columns


def _logits(codes: _Codes, table: _Codes, rows: slice, dtype: torch.dtype) -> Tensor:
    return multiply(codes.rows[rows], table.rows.t(), codes.scale, table.scale, dtype, fast=True)


def _rounded_up(rows: int) -> int:
    return -(-rows // _MULTIPLE) * _MULTIPLE
