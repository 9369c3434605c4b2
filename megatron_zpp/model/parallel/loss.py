"""The parts of the loss that are not products, where each tensor rank has some logits of all tokens.

Shapes: C tokens of a chunk, T tensor ranks, V padded vocabulary, E = V / T entries of a rank.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.loss import (
    IGNORED,
    LossKernels,
    Objective,
    logits_to_codes,
    slope,
    unit,
    wide_logits,
    z_terms,
)

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def vocabulary_parallel_loss(
    group: TensorGroup, compiler: Compiler = lambda function: function
) -> LossKernels:
    """The loss for `linear_cross_entropy`, of logits (C, E) and ids of the whole vocabulary as targets.

    Each rank finds the maximum, the sum of exponentials and the target's logit among its entries. One
    exchange of these three numbers per token tells all ranks the softmax.
    """
    local, local_gradient = compiler(_local_statistics), compiler(_to_gradient)

    def statistics(logits: Tensor, targets: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Objective]:
        """Those of all ranks (T, 3, C), targets as columns of this rank, and its objective."""
        columns = logits.shape[1]
        first = group.rank * columns
        entries = min(max(objective.vocab_size - first, 0), columns)  # that do not only pad
        place, own = targets - first, objective._replace(vocab_size=entries)
        return group.gather(local(logits, place, own)[None]), place, own

    def to_gradient(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
        found, place, own = statistics(logits, targets, objective)
        return local_gradient(logits, targets != IGNORED, place, found, own)

    def loss(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
        likelihood, _ = _likelihood(statistics(logits, targets, objective)[0])
        return -torch.where(targets != IGNORED, likelihood, 0.0).sum()

    to_codes = partial(logits_to_codes, to_gradient=to_gradient)
    return LossKernels(to_gradient, lean=True, loss=loss, to_codes=to_codes)


def _local_statistics(logits: Tensor, place: Tensor, own: Objective) -> Tensor:
    """Maximum, sum of exponentials less the maximum, and target's logit or 0 of logits (C, E): (3, C).

    `place` (C) is the column of each token's target, outside of the logits if another rank has it.
    """
    entries = own.vocab_size
    used = wide_logits(logits[:, :entries], own.cap)
    if entries == 0:
        zero = used.new_zeros(len(logits))
        return torch.stack((torch.full_like(zero, -math.inf), zero, zero))
    largest = used.amax(1)
    total = torch.exp(used - largest[:, None]).sum(1)
    inside = (place >= 0) & (place < entries)
    wanted = used.gather(1, place.clamp(0, entries - 1)[:, None])[:, 0]
    return torch.stack((largest, total, torch.where(inside, wanted, 0.0)))


def _likelihood(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """The log-likelihood of the target, and the logarithm of the sum of exponentials, each (C)."""
    largest, totals, wanted = statistics.unbind(1)  # each (T, C)
    most = largest.amax(0)
    log_total = most + torch.log((totals * torch.exp(largest - most)).sum(0))
    return wanted.sum(0) - log_total, log_total


def _to_gradient(
    logits: Tensor, counted: Tensor, place: Tensor, statistics: Tensor, own: Objective
) -> Tensor:
    """The losses; logits (C, E) become their gradient times `unit`, or 0 where not `counted` (C)."""
    likelihood, log_total = _likelihood(statistics)
    scale = unit(logits.dtype)
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = (wide_logits(logits, own.cap) - (log_total - math.log(scale))[:, None]).exp_()  # the softmax
    of_target = scale * torch.expm1(likelihood)  # softmax less one
    loss = -torch.where(counted, likelihood, 0.0).sum()
    if own.z_coeff != 0:
        z_loss, more = z_terms(log_total, own.z_coeff)
        loss = torch.stack((loss, torch.where(counted, z_loss, 0.0).sum()))
        of_target += scale * more * torch.exp(likelihood)
        gradient.mul_((1 + more)[:, None])
    gradient = torch.where(columns == place[:, None], of_target[:, None], gradient)
    if own.cap is not None:
        gradient.mul_(slope(logits, own.cap))
    logits.copy_(gradient.masked_fill_(~counted[:, None] | (columns >= own.vocab_size), 0.0))
    return loss
