"""Products of 8-bit floats with delayed scaling: the scale of a tensor is known before the tensor is.

"FP8 Formats for Deep Learning" (arXiv 2209.05433), and Transformer Engine's recipe of this name. A cast is
one pass, which finds the largest magnitude for later steps on its way and writes codes in both layouts that
the three products of a linear map take: cuBLASLt takes the right factor by columns alone.

Scales change between optimizer steps only (model/fp8/scaling.py). So every micro-batch, and a recomputation
as much as the forward that it repeats, has the same codes. Weights are cast where they are used: by rows in
the forward, by columns in the backward, since a copy of codes would have to be held for every layer. Weights
that are held as codes (model/fp8/weights.py) are multiplied as they are in the forward, and transposed in the
backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_zpp.model.fp8.cast import (
    GRADIENT,
    INPUT,
    WEIGHT,
    Cast,
    back,
    factors_of,
    largest_finite,
    plain_cast,
    present_cast,
    scale_of,
)

Transpose: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # what `plain_transpose` does, perhaps by a kernel


@dataclass(frozen=True)
class CodedInput:
    """The input of a linear map as codes, by rows (R, K) and by columns (K, R).

    `carrier` (…, K) has the shape and format of the input. With codes it has no contents, and takes the
    gradient back; without, it is the input.
    """

    carrier: Tensor
    codes: Tensor | None = None
    columns: Tensor | None = None


def as_coded(x: Tensor | CodedInput) -> CodedInput:
    """An input of a linear map, with codes or without."""
    return x if isinstance(x, CodedInput) else CodedInput(x)


def plain_transpose(codes: Tensor, after: Tensor) -> Tensor:
    """Return the codes of a weight (N, K) column by column, (K, N).

    `after` is not read. As what the backward alone has, it keeps a compiler from transposing in the forward,
    and holding the result of every layer.
    """
    return codes.t().contiguous()


class DelayedProduct(nn.Module):
    """F.linear of rows (R, K), a weight (N, K) and a bias, by 8-bit floats; R, N and K are multiples of 16.

    Without `factors`, before the first step of a run, each tensor is scaled by itself. Where the weight is
    held as `codes`, the weight that is given has no contents: it takes the gradient.
    """

    holds_codes = True  # whether its weight is one of those that can be held as codes

    factors: Tensor | None  # (2, 3, 4) fp32; see model/fp8/cast.py
    maxima: Tensor  # (3,) fp32
    codes: Tensor | None  # (N, K) E4M3
    code_factors: Tensor | None  # (2, 3, 4) fp32: those of `codes`, known before all of `factors` are

    def __init__(self, cast: Cast = plain_cast, transpose: Transpose = plain_transpose) -> None:
        super().__init__()
        self.cast, self.transpose = cast, transpose
        self.register_buffer("factors", None, persistent=False)
        self.register_buffer("maxima", torch.zeros(3), persistent=False)
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("code_factors", None, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model; the maxima stay in fp32, whatever the parameters' format becomes."""
        super()._apply(fn, recurse)
        self.maxima = self.maxima.float()
        return self

    def forward(self, input: Tensor | CodedInput, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(R, K), (N, K), (N) -> (R, N) in the dtype of the rows; codes were made with these `factors`."""
        given = as_coded(input)
        # The compiler takes no tensor twice, and both factors may be one.
        of_codes = self.code_factors if self.factors is None else None
        return CodedProduct.apply(
            *(given.carrier.flatten(0, -2), given.codes, given.columns, weight, bias),
            *(self.factors, self.maxima, self.codes, of_codes, self.cast, self.transpose),
            torch.is_grad_enabled(),
        )


class DelayedLinear(nn.Linear):
    """nn.Linear with a DelayedProduct."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        cast: Cast = plain_cast,
        transpose: Transpose = plain_transpose,
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.product = DelayedProduct(cast, transpose)

    def forward(self, input: Tensor | CodedInput) -> Tensor:
        """(..., in) -> (..., out), in the dtype of the input."""
        rows = self.product(input, self.weight, self.bias)
        return rows.unflatten(0, as_coded(input).carrier.shape[:-1])


class CodedProduct(torch.autograd.Function):
    """x @ weight.T + bias; (M, K), (N, K), (N) -> (M, N).

    `given` and `turned` are codes of x by rows and by columns, if there are any, `weight_codes` those of a
    weight that is held so, and `code_factors` its factors, where the `factors` of all three tensors are not
    known. Without a `cast`, and maxima, each tensor is scaled as `present_cast` says. `learns`: whether there
    will be a backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Tensor | None,
        turned: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        factors: Tensor | None,
        maxima: Tensor | None,
        weight_codes: Tensor | None,
        code_factors: Tensor | None,
        cast: Cast | None,
        transpose: Transpose,
        learns: bool,
    ) -> Tensor:
        if given is None:
            codes, columns, scale = coded(cast, x, factors, maxima, INPUT, rows=True, columns=learns)
        else:
            assert factors is not None
            assert turned is not None
            codes, columns, scale = given, turned, back(factors, INPUT)
        if weight_codes is None:
            by_rows, _, weight_scale = coded(cast, weight, factors, maxima, WEIGHT, rows=True, columns=False)
        else:
            by_rows, weight_scale = weight_codes, _back_of_codes(factors, code_factors)
        ctx.save_for_backward(columns, scale, weight, factors, maxima, weight_codes, code_factors)
        ctx.cast, ctx.transpose = cast, transpose
        out = multiply(codes, by_rows.t(), scale, weight_scale, x.dtype, fast=True)
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight, factors, maxima, weight_codes, code_factors = ctx.saved_tensors
        cast, dtype, wanted = ctx.cast, gradient.dtype, ctx.needs_input_grad
        by_rows, by_columns, incoming_scale = coded(
            cast, gradient, factors, maxima, GRADIENT, rows=wanted[0], columns=wanted[3]
        )
        of_x = of_weight = of_bias = None
        if wanted[0]:
            if weight_codes is None:
                _, turned, weight_scale = coded(
                    cast, weight, factors, maxima, WEIGHT, rows=False, columns=True
                )
            else:
                turned = ctx.transpose(weight_codes, by_rows)
                weight_scale = _back_of_codes(factors, code_factors)
            of_x = multiply(by_rows, turned.t(), incoming_scale, weight_scale, dtype)
        if wanted[3]:
            of_weight = multiply(by_columns, columns.t(), incoming_scale, scale, dtype)
        if wanted[4]:
            of_bias = gradient.sum(0)
        return of_x, None, None, of_weight, of_bias, *[None] * 7


def _back_of_codes(factors: Tensor | None, code_factors: Tensor | None) -> Tensor:
    """The number (1) that gives back a weight which is held as codes."""
    known = code_factors if factors is None else factors
    assert known is not None
    return back(known, WEIGHT)


def coded(
    cast: Cast | None,
    x: Tensor,
    factors: Tensor | None,
    maxima: Tensor | None,
    kind: int,
    *,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of x by rows and by columns, and the number that gives x back."""
    if cast is None:
        return present_cast(x, kind, rows=rows, columns=columns)
    # Those of x itself in a step before which nothing is known
    known = factors_of(scale_of(largest_finite(x), kind).expand(3)) if factors is None else factors
    by_rows, by_columns = cast(x.contiguous(), known, maxima, kind, rows=rows, columns=columns)
    return by_rows, by_columns, back(known, kind)


def multiply(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """(M, K) by rows, (K, N) by columns -> (M, N); `fast` lets sums of products have fewer bits than fp32."""
    return torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
    )
