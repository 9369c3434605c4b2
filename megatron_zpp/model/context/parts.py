"""Which tokens of a sample a context rank has.

Shapes: B batch, S tokens of a sample, C context ranks.

A sample is cut into 2C chunks of S / 2C tokens. Rank c has chunks c and 2C - 1 - c, in this order, so that
causal attention is equal work on all ranks.
"""

import torch
from torch import Tensor


def places(tokens: int, ranks: int, rank: int) -> tuple[range, range]:
    """Return where the two chunks of `rank` lie among the `tokens` of a sample, of which 2C is a divisor."""
    size, last = tokens // (2 * ranks), 2 * ranks - 1 - rank
    return range(rank * size, (rank + 1) * size), range(last * size, (last + 1) * size)


def own_part(whole: Tensor, ranks: int, rank: int) -> Tensor:
    """(B, S, …) of whole samples -> those of the tokens of `rank`, (B, S / C, …)."""
    chunks = places(whole.shape[1], ranks, rank)
    return torch.cat([whole[:, chunk.start : chunk.stop] for chunk in chunks], 1)


def to_parts(whole: Tensor, ranks: int) -> Tensor:
    """(B, S, …) of whole samples -> those of the tokens of each rank, (C, B, S / C, …)."""
    chunks = [chunk for rank in range(ranks) for chunk in places(whole.shape[1], ranks, rank)]
    ordered = torch.cat([whole[:, chunk.start : chunk.stop] for chunk in chunks], 1)
    return ordered.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()


def from_parts(parts: Tensor) -> Tensor:
    """The inverse of `to_parts`: (C, B, S / C, …) -> (B, S, …)."""
    firsts, lasts = parts.chunk(2, 2)
    return torch.cat([*firsts, *reversed(lasts.unbind())], 1)
