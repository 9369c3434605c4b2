"""Which tokens of a sample a context rank has.

Shapes: B batch, S tokens of a sample, C context ranks, L = S / 2C tokens of a chunk.

A sample is cut into 2C chunks. Rank c has chunks c and 2C - 1 - c, in this order, so that
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
    return torch.cat(to_parts(whole, ranks)[2 * rank : 2 * rank + 2], 1)


def to_parts(whole: Tensor, ranks: int) -> list[Tensor]:
    """(B, S, …) of whole samples -> the two chunks of each rank, rank by rank: each (B, L, …)."""
    chunks = whole.chunk(2 * ranks, 1)
    return [chunk for pair in zip(chunks[:ranks], chunks[: ranks - 1 : -1], strict=True) for chunk in pair]


def from_parts(parts: Tensor) -> Tensor:
    """The inverse of `to_parts`: chunks of each rank (C, 2, B, L, …) -> (B, S, …)."""
    firsts, lasts = parts.unbind(1)
    return torch.cat([*firsts, *reversed(lasts.unbind())], 1)


def chunks_of(part: Tensor) -> Tensor:
    """(B, S / C, …) of one rank -> its chunks, (2, B, L, …)."""
    return part.unflatten(1, (2, -1)).movedim(1, 0)
