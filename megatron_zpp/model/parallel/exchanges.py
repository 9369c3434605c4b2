"""Exchanges of activations between tensor ranks, and products with them, with their gradients.

Shapes: T ranks, R rows of a rank, T · R tokens laid end to end.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.parallel import overlap


class Gather(torch.autograd.Function):
    """(R, …) -> the rows of all ranks (T · R, …); the backward sums what each rank made of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.scatter_sum(gradient), None


class ScatterSum(torch.autograd.Function):
    """(T · R, …) -> this rank's rows of the sum over ranks (R, …)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.scatter_sum(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(gradient), None


class GatheredLinear(torch.autograd.Function):
    """F.linear of the rows of all ranks; rows (R, D) are kept, and gathered once more by the backward.

    `overlapped`: products run beside the exchanges (model/parallel/overlap.py).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, overlapped: bool, group: TensorGroup
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.overlapped, ctx.group = overlapped, group
        if overlapped:
            return overlap.gathered_linear(rows, weight, bias, group.name)
        return F.linear(group.gather(rows), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        group, wanted = ctx.group, ctx.needs_input_grad
        if ctx.overlapped:
            found = overlap.gathered_linear_backward(gradient, rows, weight, wanted[2], group.name)
            return *found[:2], found[2] if wanted[2] else None, None, None
        if torch.compiler.is_compiling():
            rows = _after(rows, gradient)
        gathering = group.start_gather(rows) if wanted[1] else None
        scattering = group.start_scatter_sum(gradient @ weight) if wanted[0] else None
        of_weight = None if gathering is None else gradient.t() @ group.wait(gathering)
        of_bias = gradient.sum(0) if wanted[2] else None
        return None if scattering is None else group.wait(scattering), of_weight, of_bias, None, None


def _after(rows: Tensor, gradient: Tensor) -> Tensor:
    """`rows`, in a graph that the compiler can only compute when `gradient` is there.

    Otherwise it would find that forward and backward gather the same rows, gather them once, and keep the
    rows of all ranks for the backward.
    """
    first = gradient[:1, :1]
    return torch.where(first == first, rows, rows)


class LinearScattered(torch.autograd.Function):
    """The products of all ranks with their inputs (T · R, inputs / T), summed and scattered to (R, D)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, overlapped: bool, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.overlapped, ctx.group = overlapped, group
        if overlapped:
            return overlap.linear_scattered(rows, weight, group.name)
        return group.scatter_sum(F.linear(rows, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        if ctx.overlapped:
            gradients = overlap.linear_scattered_backward(gradient, rows, weight, ctx.group.name)
            return *gradients, None, None
        gathered = ctx.group.gather(gradient)
        of_rows = gathered @ weight if ctx.needs_input_grad[0] else None
        of_weight = gathered.t() @ rows if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None, None
