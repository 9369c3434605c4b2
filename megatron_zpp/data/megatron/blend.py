"""Megatron-LM's blend of data sets, as in megatron-core: sample i is the next sample of data set k.

k is the data set that is furthest behind its weight: the first with the largest w[k] · max(i, 1) - count[k],
in float64. Each choice depends on all choices before it, but only through the counts, and slightly wrong
counts become right after a few choices. So the samples are divided into lanes that are computed in parallel.
Each lane starts from counts estimated a little before it. A lane is computed again if its initial counts
differ from the final counts of the lane before. The result is therefore exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.order_cache import CachedArrays

BLEND_INDEXES = ("dataset_index", "dataset_sample_index")
_PIECE = 1 << 22  # samples in memory at a time
_LANES, _SHORTEST = 2048, 256  # most lanes of a piece; samples per lane, at least
_BLOCK = 64  # steps whose choices are transposed together, from a row per step to a row per lane


def blend_pieces(weights: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (data set int16, its sample number int32 or int64) of `size` samples, piece by piece.

    weights (K,) sum to 1.
    """
    counts = np.zeros(len(weights))
    for first in range(0, size, _PIECE):
        here = min(_PIECE, size - first)
        length = max(_SHORTEST, -(-here // _LANES))
        firsts = np.arange(first, first + here, length)
        starts = _estimated_counts(weights, firsts, counts, min(length, 4 * len(weights) + 32))
        ends = np.empty_like(starts)
        which, numbers = _empty(len(firsts), length, size)
        pending = np.arange(len(firsts))
        while pending.size:
            counts = starts.take(pending, axis=1)
            _choose(weights, firsts[pending], counts, pending, which, numbers)
            ends[:, pending] = counts
            pending = 1 + np.flatnonzero((starts[:, 1:] != ends[:, :-1]).any(axis=0))
            starts[:, pending] = ends[:, pending - 1]
        counts = ends[:, -1]  # right for a full piece; only the last piece is shorter
        yield which.reshape(-1)[:here], numbers.reshape(-1)[:here]


def blend_order(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all pieces of `blend_pieces`, concatenated: (size,) each."""
    which, numbers = zip(*blend_pieces(weights, size), strict=True)
    return np.concatenate(which), np.concatenate(numbers)


def exhaustive_order(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Like `blend_order`, with every sample of each set once; skips exhausted sets. sizes (K,) int64."""
    total = int(sizes.sum())
    weights = sizes / total
    which, numbers = blend_order(weights, total)
    beyond = np.flatnonzero(numbers >= sizes[which])
    if beyond.size:  # no earlier sample was drawn from an exhausted set
        first = int(beyond[0])
        counts = np.bincount(which[:first], minlength=len(sizes))
        _choose_unexhausted(weights.tolist(), counts.tolist(), sizes.tolist(), which, numbers, first)
    return which, numbers


def _choose_unexhausted(
    weights: list[float],
    counts: list[int],
    sizes: list[int],
    which: np.ndarray,
    numbers: np.ndarray,
    first: int,
) -> None:
    """Draw the samples from `first` on one by one: few remain when a set is exhausted."""
    remaining = [source for source in range(len(sizes)) if counts[source] < sizes[source]]
    for sample in range(first, len(which)):
        source = max(remaining, key=lambda source: weights[source] * max(sample, 1.0) - counts[source])
        which[sample], numbers[sample] = source, counts[source]
        counts[source] += 1
        if counts[source] == sizes[source]:
            remaining.remove(source)


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
        _choose(weights, early, settled, np.arange(len(early)), *_empty(len(early), settle, 0))
        starts[:, 1:] = settled
    return starts


def _empty(rows: int, length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return empty arrays for choices and for numbers below `size`."""
    return np.empty((rows, length), np.int16), np.empty((rows, length), number_dtype(size))


def number_dtype(size: int) -> np.dtype:
    """Return the dtype of sample numbers in a blend of `size` samples."""
    return np.dtype(np.int32 if size <= np.iinfo(np.int32).max else np.int64)


def _choose(
    weights: np.ndarray,
    firsts: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    which: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """Write the choices of a blend by lanes: lane k begins at sample firsts[k] and fills row rows[k].

    weights (K,) float64; counts (K, lanes) float64, updated in place; which (…, steps) int16; numbers
    (…, steps) int32 or int64.
    """
    lanes, length = len(firsts), which.shape[1]
    small = np.uint8 if len(weights) <= 256 else np.int16
    flat, lane = counts.reshape(-1), np.arange(lanes)
    assert np.shares_memory(flat, counts), "counts must be contiguous"
    sample, best, behind = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    further, found, place = np.empty(lanes, bool), np.empty(lanes, small), np.empty(lanes, np.int64)
    choices, drawn = np.empty((_BLOCK, lanes), small), np.empty((_BLOCK, lanes))
    for step in range(length):
        row = step % _BLOCK
        np.maximum(firsts + step, 1, out=sample, casting="unsafe")
        choice, number = choices[row], drawn[row]
        choice.fill(0)
        np.subtract(np.multiply(sample, weights[0], out=best), counts[0], out=best)
        for source in range(1, len(weights)):
            np.subtract(np.multiply(sample, weights[source], out=behind), counts[source], out=behind)
            np.greater(behind, best, out=further)
            np.maximum(choice, np.multiply(further, small(source), out=found), out=choice)
            if source < len(weights) - 1:
                np.maximum(best, behind, out=best)
        np.add(np.multiply(choice, lanes, out=place, dtype=np.int64), lane, out=place)
        flat.take(place, out=number, mode="clip")  # all are in range, and "raise" would copy
        flat[place] = number + 1
        if row == _BLOCK - 1 or step == length - 1:
            which[rows, step - row : step + 1] = choices[: row + 1].T
            numbers[rows, step - row : step + 1] = drawn[: row + 1].T


@dataclass(frozen=True)
class MegatronBlend:
    """A finite order of K data sets: sample i is sample dataset_sample_index[i] of set dataset_index[i]."""

    weights: tuple[float, ...]
    indexes: CachedArrays

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (data set, its sample number), each (len,) int64."""
        which, numbers = (self.indexes[name][indices].astype(np.int64) for name in BLEND_INDEXES)
        return which, numbers

    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` come from each data set: (K,)."""
        which = self.indexes[BLEND_INDEXES[0]]
        counts = np.zeros(len(self.weights), np.int64)
        for first in range(0, samples, _PIECE):
            counts += np.bincount(which[first : min(first + _PIECE, samples)], minlength=len(self.weights))
        return counts
