"""The softmax of logits that are never together: three numbers per token of each part of the vocabulary.

Parts are those of tensor ranks, or blocks of rows of the output weights. Shapes: C tokens, P parts, E entries
of a part, of which there may be fewer in the last one.
"""

import math

import torch
from torch import Tensor

from megatron_zpp.model.loss import Objective, wide_logits


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
