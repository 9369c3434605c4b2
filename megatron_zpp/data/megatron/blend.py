"""Megatron-LM's blend of data sets, as in megatron-core: sample i is the next sample of data set k.

k is the data set that is furthest behind its weight: the first with the largest w[k] · max(i, 1) - count[k],
in float64. Each choice depends on all choices before it, but only through the counts, and slightly wrong
counts become right after a few choices. So the samples are divided into lanes that are computed in parallel.
Each lane starts from counts estimated a little before it. A lane is computed again if its initial counts
differ from the final counts of the lane before. The result is therefore exact.
"""

from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.blend import BlendOrder
from megatron_zpp.data.order_cache import CachedArrays

BLEND_INDEXES = ("dataset_index", "dataset_sample_index")
_PIECE = 1 << 22  # samples whose lanes are computed together
_LANES, _SHORTEST = 2048, 256  # most lanes of a piece; samples per lane, at least


def blend_order(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (data set int16, its sample number int32 or int64), (size,) each; weights (K,) sum to 1."""
    which = np.empty(size, np.int16)
    numbers = np.empty(size, np.int32 if size <= np.iinfo(np.int32).max else np.int64)
    counts = np.zeros(len(weights))
    for first in range(0, size, _PIECE):
        here = slice(first, min(first + _PIECE, size))
        length = max(_SHORTEST, -(-(here.stop - first) // _LANES))
        firsts = np.arange(first, here.stop, length)
        starts = _estimated_counts(weights, firsts, counts, min(length, 4 * len(weights) + 32))
        ends = np.empty_like(starts)
        chosen, drawn = np.empty((2, len(firsts), length), np.int64)
        pending = np.arange(len(firsts))
        while pending.size:
            counts = starts[:, pending]
            chosen[pending], drawn[pending] = _choose(weights, firsts[pending], counts, length)
            ends[:, pending] = counts
            pending = 1 + np.flatnonzero((starts[:, 1:] != ends[:, :-1]).any(axis=0))
            starts[:, pending] = ends[:, pending - 1]
        counts = ends[:, -1]  # right for a full piece; only the last piece is shorter
        which[here], numbers[here] = (lanes.reshape(-1)[: here.stop - first] for lanes in (chosen, drawn))
    return which, numbers


def exhaustive_order(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Like `blend_order`, with every sample of each set once; skips exhausted sets. sizes (K,) int64."""
    total = int(sizes.sum())
    weights = sizes / total
    which, numbers = blend_order(weights, total)
    beyond = np.flatnonzero(numbers >= sizes[which])
    first = int(beyond[0]) if beyond.size else total  # no earlier sample was drawn from an exhausted set
    counts = np.bincount(which[:first], minlength=len(sizes))
    for sample in range(first, total):  # few: all sets end at almost the same time
        behind = np.where(counts < sizes, weights * max(sample, 1.0) - counts, -np.inf)
        source = int(behind.argmax())
        which[sample], numbers[sample] = source, counts[source]
        counts[source] += 1
    return which, numbers


def _estimated_counts(weights: np.ndarray, firsts: np.ndarray, counts: np.ndarray, settle: int) -> np.ndarray:
    """Return estimated counts (K, lanes) float64 at the samples `firsts`.

    The first lane has the given counts (K,). The others have rounded shares, corrected by `settle` choices.
    """
    starts = np.empty((len(weights), len(firsts)))
    starts[:, 0] = counts
    if len(firsts) > 1:
        early = np.maximum(firsts[1:] - settle, 0)
        shares = weights[:, None] * early
        settled = np.floor(shares)
        missing = early - settled.sum(axis=0)  # whole samples, which go to the largest remainders
        rank = np.argsort(np.argsort(settled - shares, axis=0, kind="stable"), axis=0)
        settled += rank < missing
        _choose(weights, early, settled, settle)
        starts[:, 1:] = settled
    return starts


def _choose(
    weights: np.ndarray, firsts: np.ndarray, counts: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the choices of a blend and their sample numbers by lanes, `length` from each of `firsts` on.

    weights (K,) float64; counts (K, lanes) float64, updated in place; two (lanes, length) int64.
    """
    lanes = np.arange(len(firsts))
    chosen, drawn = np.empty((2, length, len(lanes)), np.int64)
    for step in range(length):
        behind = weights[:, None] * np.maximum(firsts + step, 1) - counts
        chosen[step] = choice = behind.argmax(axis=0)
        drawn[step] = counts[choice, lanes]
        counts[choice, lanes] += 1
    return chosen.T, drawn.T


@dataclass(frozen=True)
class MegatronBlend(BlendOrder):
    """A finite order of K data sets: sample i is sample dataset_sample_index[i] of set dataset_index[i]."""

    indexes: CachedArrays

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        which, numbers = (self.indexes[name][indices].astype(np.int64) for name in BLEND_INDEXES)
        return which, numbers

    def counts(self, samples: int) -> np.ndarray:
        which = self.indexes[BLEND_INDEXES[0]]
        counts = np.zeros(len(self.weights), np.int64)
        for first in range(0, samples, _PIECE):
            counts += np.bincount(which[first : min(first + _PIECE, samples)], minlength=len(self.weights))
        return counts
