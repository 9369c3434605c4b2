"""Products of tensor ranks beside the exchange of their tokens (distributed/peer_rows.py).

Shapes: T ranks, N tokens of a micro-batch, R = N / T rows of a rank, D hidden size.

A product takes the tokens of one rank at a time. Of gathered rows it takes the own first, while those of
others are on their way; where products are summed over ranks it makes those of others first, which travel
while it makes its own. A gradient of a weight is one product over all tokens, because a sum of T products
would be rounded T times.

Each function is one operator, which takes the name of the group. So the compiler of a layer can neither move
a wait before a product nor keep gathered rows for the backward.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from megatron_zpp.distributed import peer_rows
from megatron_zpp.distributed.tensor_group import TensorGroup


@custom_op("megatron_zpp_model::gathered_linear", mutates_args=())
def gathered_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """F.linear of the gathered rows: (R, D), (outputs, D) and (outputs) -> (N, outputs)."""
    group, peers, rows = _gather(rows, name)
    return _products(peers, rows, weight.t(), bias, group)


@custom_op("megatron_zpp_model::gathered_linear_backward", mutates_args=())
def gathered_linear_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, biased: bool, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `gathered_linear`, of (N, outputs): of the rows (R, D), the weight, and the bias.

    The rows are gathered beside one product, and the gradient is sent beside the other. That of the bias is
    empty unless it is `biased`; outside of this operator the compiler would compute the whole gradient again
    for it.
    """
    group, peers, rows = _gather(rows, name, whole=True)
    _send_products(peers, gradient, weight, group)
    of_bias = gradient.sum(0) if biased else gradient.new_empty(0)
    of_weight = gradient.t() @ peers.gathered()
    return peers.sum(), of_weight, of_bias


@custom_op("megatron_zpp_model::linear_scattered", mutates_args=())
def linear_scattered(rows: Tensor, weight: Tensor, name: str) -> Tensor:
    """The products of all ranks with their inputs, summed: (N, inputs), (D, inputs) -> (R, D)."""
    group = TensorGroup.named(name)
    peers = peer_rows.begin(group, len(rows) // group.size, len(weight), rows)
    _send_products(peers, rows, weight.t(), group)
    return peers.sum()


@custom_op("megatron_zpp_model::linear_scattered_backward", mutates_args=())
def linear_scattered_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """The gradients of `linear_scattered`, of (R, D): those of all its rows (N, inputs) and of the weight."""
    group, peers, gradient = _gather(gradient, name, whole=True)
    return _products(peers, gradient, weight, None, group), peers.gathered().t() @ rows


def _gather(
    rows: Tensor, name: str, *, whole: bool = False
) -> tuple[TensorGroup, peer_rows.PeerRows, Tensor]:
    """Begin to gather rows (R, …): the group, what gathers, and the rows without gaps."""
    group, rows = TensorGroup.named(name), rows.contiguous()
    peers = peer_rows.begin(group, len(rows), rows.shape[1], rows)
    peers.gather(rows, whole=whole)
    return group, peers, rows


def _products(
    peers: peer_rows.PeerRows, rows: Tensor, matrix: Tensor, bias: Tensor | None, group: TensorGroup
) -> Tensor:
    """The products of gathered rows (N, …), of which `rows` (R, …) are the own, and a matrix, plus a bias."""
    out = rows.new_empty(group.size * len(rows), matrix.shape[1])
    shares = out.chunk(group.size)
    for rank in peer_rows.own_first(group):
        input = rows if rank == group.rank else peers.rows_of(rank)
        if bias is None:
            torch.mm(input, matrix, out=shares[rank])
        else:
            torch.addmm(bias, input, matrix, out=shares[rank])
    return out


def _send_products(peers: peer_rows.PeerRows, rows: Tensor, matrix: Tensor, group: TensorGroup) -> None:
    """Send the products of rows (N, …) and a matrix to the ranks that will sum them, and keep the own."""
    parts = rows.chunk(group.size)
    for rank in peer_rows.others_first(group):
        if rank == group.rank:
            torch.mm(parts[rank], matrix, out=peers.own())
        else:
            peers.send(parts[rank] @ matrix, rank)


@gathered_linear.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return rows.new_empty(len(rows) * TensorGroup.named(name).size, len(weight))


@gathered_linear_backward.register_fake
def _(
    gradient: Tensor, rows: Tensor, weight: Tensor, biased: bool, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = gradient.new_empty(len(weight) if biased else 0)
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape), of_bias


@linear_scattered.register_fake
def _(rows: Tensor, weight: Tensor, name: str) -> Tensor:
    return rows.new_empty(len(rows) // TensorGroup.named(name).size, len(weight))


@linear_scattered_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)
