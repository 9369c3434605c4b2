"""The softmax of logits that are never together: three numbers per token of each part of the vocabulary.

Parts are those of tensor ranks, or blocks of rows of the output weights. Shapes: C tokens, P parts, E entries
of a part, of which there may be fewer in the last one.
"""

import math

import torch
from torch import Tensor

from megatron_zpp.model.loss import Objective, slope, wide_logits, z_terms


def local_statistics(logits: Tensor, place: Tensor, objective: Objective) -> Tensor:
    """Maximum, sum of exponentials less the maximum, and target's logit or 0 of logits (C, E): (3, C).

    `place` (C) is the column of each token's target, outside of the part if another one has it. The
    `vocab_size` of the objective is that of the part: its columns that do not only pad the vocabulary.
    """
    entries = objective.vocab_size
    used = wide_logits(logits[:, :entries], objective.cap)
    if entries == 0:
        zero = used.new_zeros(len(logits))
        return torch.stack((torch.full_like(zero, -math.inf), zero, zero))
    largest = used.amax(1)
    total = torch.exp(used - largest[:, None]).sum(1)
    inside = (place >= 0) & (place < entries)
    wanted = used.gather(1, place.clamp(0, entries - 1)[:, None])[:, 0]
    return torch.stack((largest, total, torch.where(inside, wanted, 0.0)))


def local_gradient(
    logits: Tensor, place: Tensor, message: Tensor, objective: Objective, scale: float = 1.0
) -> Tensor:
    """Logits (C, E) become their gradient times `scale`, in their place; see `local_statistics`.

    `message` (3, C) has what follows from the statistics of all parts: the factor of a token's gradient, the
    logarithm of the denominator and the log-likelihood of the target.
    """
    factor, log_total, likelihood = message.unbind()  # each (C)
    columns = torch.arange(logits.shape[1], device=logits.device)
    softmax = (wide_logits(logits, objective.cap) - (log_total - math.log(scale))[:, None]).exp_()
    of_target = scale * torch.expm1(likelihood)  # softmax less one
    if objective.z_coeff != 0:
        _, more = z_terms(log_total, objective.z_coeff)
        of_target += scale * more * torch.exp(likelihood)
        softmax.mul_((1 + more)[:, None])
    gradient = torch.where(columns == place[:, None], of_target[:, None], softmax).mul_(factor[:, None])
    if objective.cap is not None:
        gradient.mul_(slope(logits, objective.cap))
    unused = (factor == 0)[:, None] | (columns >= objective.vocab_size)
    return logits.copy_(gradient.masked_fill_(unused, 0.0))
