"""Attention masks: one type for each kind.

Shapes: B batch, T tokens of this forward pass, C columns of the cache up to now, E ends of documents.

A window counts the tokens that a token attends to, itself included; None stands for all before it. `bounds`
is what the kernel that reads it has made: FlexAttention's BlockMask (model/flex.py), or as each mask says.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Causal:
    """Each token attends to itself and to all tokens before it in its row."""

    bounds: Any = None


@dataclass(frozen=True)
class SlidingWindow:
    """Causal, and only to the newest `window` tokens.

    `bounds` are the ends of rows (B + 1), a mask (1, 1, T, T) that is added to the scores, or nothing.
    """

    window: int
    bounds: Any = None


@dataclass(frozen=True)
class InsideDocuments:
    """Causal, and only to tokens of the same document, of these to the newest `window` ones.

    `bounds` are the ends of documents (E), or a mask (B, 1, T, T) that is added to the scores.
    """

    bounds: Any
    window: int | None = None


@dataclass(frozen=True)
class CachedPrefix:
    """Causal over the columns of a cache, the last T of which are the new tokens.

    `visible` (B, 1, T, C) is True where a token attends to a column. None stands for a single token that
    attends to every column, or for tokens that begin in column 0 of a cache without padding.
    """

    visible: Tensor | None = None


Mask: TypeAlias = Causal | SlidingWindow | InsideDocuments | CachedPrefix
CAUSAL = Causal()
