"""Products of tensor ranks beside the exchange of their tokens, piece by piece.

Shapes: T ranks, N tokens of a micro-batch, R = N / T rows of a rank, C pieces of N / C tokens, D hidden size.

The N tokens, laid end to end, are cut into C equal pieces, and a rank has its T-th of each piece. What the
ranks have of one piece is gathered in its place, so that the product of one piece reads and writes contiguous
rows while later pieces are on their way, and nothing is copied. Results are those of one exchange and one
product: a gradient of a weight is one product over all tokens, because a sum over pieces would be rounded C
times.

Inside a compiled layer each function is one operator. The compiler can then neither move a wait before a
product nor keep gathered rows for the backward.
"""

from itertools import starmap

import torch
from torch import Tensor
from torch.distributed import Work
from torch.library import custom_op

from megatron_zpp.distributed.tensor_group import TensorGroup


def gather(rows: Tensor, pieces: int, group: TensorGroup) -> Tensor:
    """(R, …) on each rank -> (N, …), in the order of tokens."""
    rows = rows.contiguous()
    gathered, started = _start_gathers(rows, pieces, group)
    _wait(started)
    return gathered


def scatter_sum(rows: Tensor, pieces: int, group: TensorGroup) -> Tensor:
    """(N, …), in the order of tokens -> this rank's rows of the sum over ranks (R, …)."""
    rows = rows.contiguous()
    own, started = _start_scatters(rows, pieces, group)
    _wait(started)
    return own


def gathered_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, pieces: int, group: TensorGroup
) -> Tensor:
    """F.linear of the gathered rows: (R, D), (outputs, D) and (outputs) -> (N, outputs)."""
    if torch.compiler.is_compiling():
        return _gathered_linear(rows, weight, bias, pieces, group.name)
    rows = rows.contiguous()
    gathered, started = _start_gathers(rows, pieces, group)
    out = rows.new_empty(len(gathered), len(weight))
    for work, piece, product in zip(started, gathered.chunk(pieces), out.chunk(pieces), strict=True):
        work.wait()
        if bias is None:
            torch.mm(piece, weight.t(), out=product)
        else:
            torch.addmm(bias, piece, weight.t(), out=product)
    return out


def gathered_linear_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, pieces: int, group: TensorGroup
) -> tuple[Tensor, Tensor]:
    """The gradients of `gathered_linear`, of (N, outputs): those of the rows (R, D) and of the weight.

    The rows are gathered beside one product, and the gradient is scattered beside the other.
    """
    if torch.compiler.is_compiling():
        return _gathered_linear_backward(gradient, rows, weight, pieces, group.name)
    rows = rows.contiguous()
    gathered, gathering = _start_gathers(rows, pieces, group)
    product = gradient @ weight
    of_rows, scattering = _start_scatters(product, pieces, group)
    _wait(gathering)
    of_weight = gradient.t() @ gathered
    _wait(scattering)
    return of_rows, of_weight


def linear_scattered(rows: Tensor, weight: Tensor, pieces: int, group: TensorGroup) -> Tensor:
    """The products of all ranks with their inputs, summed: (N, inputs), (D, inputs) -> (R, D)."""
    if torch.compiler.is_compiling():
        return _linear_scattered(rows, weight, pieces, group.name)
    own = rows.new_empty(len(rows) // group.size, len(weight))
    products, started = [], []
    for piece, result in zip(rows.chunk(pieces), own.chunk(pieces), strict=True):
        products.append(piece @ weight.t())  # which stay until their sums have been waited for
        started.append(group.start_scatter_sum_into(result, products[-1]))
    _wait(started)
    return own


def linear_scattered_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, pieces: int, group: TensorGroup
) -> tuple[Tensor, Tensor]:
    """The gradients of `linear_scattered`, of (R, D): those of all its rows (N, inputs) and of the weight."""
    if torch.compiler.is_compiling():
        return _linear_scattered_backward(gradient, rows, weight, pieces, group.name)
    gradient = gradient.contiguous()
    gathered, started = _start_gathers(gradient, pieces, group)
    of_rows = rows.new_empty(rows.shape)
    for work, piece, product in zip(started, gathered.chunk(pieces), of_rows.chunk(pieces), strict=True):
        work.wait()
        torch.mm(piece, weight, out=product)
    return of_rows, gathered.t() @ rows


def _start_gathers(rows: Tensor, pieces: int, group: TensorGroup) -> tuple[Tensor, list[Work]]:
    """Start to gather all pieces of contiguous rows (R, …) to (N, …), and what to wait for before each."""
    gathered = rows.new_empty(group.size * len(rows), *rows.shape[1:])
    parts = zip(gathered.chunk(pieces), rows.chunk(pieces), strict=True)
    return gathered, list(starmap(group.start_gather_into, parts))


def _start_scatters(rows: Tensor, pieces: int, group: TensorGroup) -> tuple[Tensor, list[Work]]:
    """Start to sum and scatter all pieces of contiguous rows (N, …) to (R, …), and what to wait for."""
    own = rows.new_empty(len(rows) // group.size, *rows.shape[1:])
    parts = zip(own.chunk(pieces), rows.chunk(pieces), strict=True)
    return own, list(starmap(group.start_scatter_sum_into, parts))


def _wait(started: list[Work]) -> None:
    """Let the current stream (on a CPU: the caller) wait for all of them."""
    for work in started:
        work.wait()


@custom_op("megatron_zpp_model::gathered_linear", mutates_args=())
def _gathered_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, pieces: int, group: str) -> Tensor:
    return gathered_linear(rows, weight, bias, pieces, TensorGroup.named(group))


@_gathered_linear.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, pieces: int, group: str) -> Tensor:
    return rows.new_empty(len(rows) * TensorGroup.named(group).size, len(weight))


@custom_op("megatron_zpp_model::gathered_linear_backward", mutates_args=())
def _gathered_linear_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, pieces: int, group: str
) -> tuple[Tensor, Tensor]:
    return gathered_linear_backward(gradient, rows, weight, pieces, TensorGroup.named(group))


@_gathered_linear_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, pieces: int, group: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


@custom_op("megatron_zpp_model::linear_scattered", mutates_args=())
def _linear_scattered(rows: Tensor, weight: Tensor, pieces: int, group: str) -> Tensor:
    return linear_scattered(rows, weight, pieces, TensorGroup.named(group))


@_linear_scattered.register_fake
def _(rows: Tensor, weight: Tensor, pieces: int, group: str) -> Tensor:
    return rows.new_empty(len(rows) // TensorGroup.named(group).size, len(weight))


@custom_op("megatron_zpp_model::linear_scattered_backward", mutates_args=())
def _linear_scattered_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, pieces: int, group: str
) -> tuple[Tensor, Tensor]:
    return linear_scattered_backward(gradient, rows, weight, pieces, TensorGroup.named(group))


@_linear_scattered_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, pieces: int, group: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)
