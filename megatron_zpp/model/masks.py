"""Which tokens attention lets a token attend to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Each token attends to itself and to the tokens before it in its row.

    window      only to the newest so many tokens, itself included; None: to all
    documents   only to tokens of the same document
    cached      rows are columns of a cache, the last ones of which are the new tokens
    bounds      what the kernel that reads the mask has made of window and documents: AttentionKernel.bounds.
                With a cache of C columns, (B, 1, T, C), True where a new token attends to a column; None: as
                above, without padding
    """

    window: int | None = None
    documents: bool = False
    cached: bool = False
    bounds: Any = None


CAUSAL = Mask()


def first_seen(
    places: Tensor, tokens: int, window: int | None, ends: Tensor | None = None, rows: int = 1
) -> Tensor:
    """The first token of its row that each token sees, (B, T); it sees those from there up to itself.

    `places` (T) are those of the tokens in each of B `rows`, of `tokens` each; `ends` (E) of documents as in
    model/attention.py.
    """
    newest = (places - (window or tokens) + 1).clamp(min=0)
    if ends is None:
        return newest.expand(rows, -1)
    begins = tokens * torch.arange(rows, dtype=ends.dtype, device=ends.device)[:, None]
    documents = ends[torch.bucketize(begins + places, ends, right=True) - 1]  # the last end up to a token
    return torch.maximum(documents - begins, newest)
