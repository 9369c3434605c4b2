"""Which tokens attention lets a token attend to."""

from dataclasses import dataclass
from typing import Any


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
