"""Megatron-LM's blend of data sets, as megatron-core draws it: sample i is the next one of data set k.

k is the set that is furthest behind its weight, the first of several: the largest
w[k] · max(i, 1) - count[k], in float64. Each choice depends on all before, but only through the counts, and
counts that are a little wrong are right after a few choices. So the samples are cut into lanes that are
computed side by side: each starts from counts estimated a little before it, and where a lane's counts are not
those that the lane before ends with, it is computed again from these. What is returned is therefore the
sequence of choices, not an estimate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.megatron.compiled_orders import CompiledOrders

BLEND_INDEXES = ("dataset_index", "dataset_sample_index")
_PIECE = 1 << 22  # samples that are in memory at once
_LANES, _COMPILED_LANES, _SHORTEST = 2048, 64, 256  # at most so many, of at least so many samples
_BLOCK = 64  # steps whose choices are turned from a row a step into a row a lane at once


def blend_pieces(
    weights: np.ndarray, size: int, compiled: CompiledOrders | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(data set int16, its sample number int32 or int64) of samples one piece after the other, `size` in all.

    weights (K,) sum to 1.
    """
    choose = compiled.choose if compiled else _choose_by_numpy
    counts = np.zeros(len(weights))
    for first in range(0, size, _PIECE):
        here = min(_PIECE, size - first)
        length = max(_SHORTEST, -(-here // (_COMPILED_LANES if compiled else _LANES)))
        firsts = np.arange(first, first + here, length)
        starts = _estimated_counts(weights, firsts, counts, choose, min(length, 4 * len(weights) + 32))
        ends = np.empty_like(starts)
        which, numbers = _empty(len(firsts), length, size)
        pending = np.arange(len(firsts))
        while pending.size:
            counts = starts.take(pending, axis=1)
            choose(weights, firsts[pending], counts, pending, which, numbers)
            ends[:, pending] = counts
            pending = 1 + np.flatnonzero((starts[:, 1:] != ends[:, :-1]).any(axis=0))
            starts[:, pending] = ends[:, pending - 1]
        counts = ends[:, -1]  # of a whole piece; after a shorter one there is none
        yield which.reshape(-1)[:here], numbers.reshape(-1)[:here]


def blend_order(
    weights: np.ndarray, size: int, compiled: CompiledOrders | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same in one piece: (size,) each."""
    pieces = list(blend_pieces(weights, size, compiled))
    if len(pieces) == 1:
        return pieces[0]
    which, numbers = zip(*pieces, strict=True)
    return np.concatenate(which), np.concatenate(numbers)


def exhaustive_order(
    sizes: np.ndarray, compiled: CompiledOrders | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """As `blend_order`, with every sample of each set once: sizes (K,) int64. Exhausted sets are skipped."""
    total = int(sizes.sum())
    weights = sizes / total
    which, numbers = blend_order(weights, total, compiled)
    spent = np.flatnonzero(numbers >= sizes[which])
    if spent.size:  # up to there nothing was drawn from a spent set
        counts = np.bincount(which[: spent[0]], minlength=len(sizes))
        _choose_unspent(weights.tolist(), counts.tolist(), sizes.tolist(), which, numbers, int(spent[0]))
    return which, numbers


def _choose_unspent(
    weights: list[float],
    counts: list[int],
    sizes: list[int],
    which: np.ndarray,
    numbers: np.ndarray,
    first: int,
) -> None:
    """Fills in what is drawn from sample `first` on, one by one: only few are left when a set is spent."""
    unspent = [source for source in range(len(sizes)) if counts[source] < sizes[source]]
    for sample in range(first, len(which)):
        source = max(unspent, key=lambda source: weights[source] * max(sample, 1.0) - counts[source])
        which[sample], numbers[sample] = source, counts[source]
        counts[source] += 1
        if counts[source] == sizes[source]:
            unspent.remove(source)


def _estimated_counts(
    weights: np.ndarray, firsts: np.ndarray, counts: np.ndarray, choose: Callable[..., None], settle: int
) -> np.ndarray:
    """Counts (K, lanes) float64 at the samples `firsts`: those given (K,) at the first; at the others rounded
    shares, and the `settle` choices before.
    """
    starts = np.empty((len(weights), len(firsts)))
    starts[:, 0] = counts
    if len(firsts) > 1:
        early = np.maximum(firsts[1:] - settle, 0)
        shares = weights[:, None] * early
        settled = np.floor(shares)
        missing = early - settled.sum(axis=0)  # whole samples, for the largest remainders
        rank = np.argsort(np.argsort(settled - shares, axis=0, kind="stable"), axis=0)
        settled += rank < missing
        choose(weights, early, settled, np.arange(len(early)), *_empty(len(early), settle, 0))
        starts[:, 1:] = settled
    return starts


def _empty(rows: int, length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Room for choices, and for numbers below `size`."""
    wide = np.int32 if size <= np.iinfo(np.int32).max else np.int64
    return np.empty((rows, length), np.int16), np.empty((rows, length), wide)


def _choose_by_numpy(
    weights: np.ndarray,
    firsts: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    which: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """As CompiledOrders.choose."""
    for step, choices, drawn in _choose(weights, firsts, counts, which.shape[1]):
        which[rows, step : step + len(choices)] = choices.T
        numbers[rows, step : step + len(drawn)] = drawn.T


def _choose(
    weights: np.ndarray, firsts: np.ndarray, counts: np.ndarray, length: int
) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    """The choices of `length` steps in each lane, which `counts` (K, lanes) then includes.

    Yields (step, data set (steps, lanes) uint8 or int16, its sample number (steps, lanes) float64), some
    steps at a time; the arrays are used again.
    """
    lanes = len(firsts)
    if not lanes:
        return
    small = np.uint8 if len(weights) <= 256 else np.int16
    flat, lane = counts.reshape(-1), np.arange(lanes)
    assert np.shares_memory(flat, counts), "counts are contiguous"
    sample, best, behind = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    further, found, place = np.empty(lanes, bool), np.empty(lanes, small), np.empty(lanes, np.int64)
    which, numbers = np.empty((_BLOCK, lanes), small), np.empty((_BLOCK, lanes))
    for step in range(length):
        row = step % _BLOCK
        np.maximum(firsts + step, 1, out=sample, casting="unsafe")
        choice, number = which[row], numbers[row]
        choice.fill(0)
        np.subtract(np.multiply(sample, weights[0], out=best), counts[0], out=best)
        for source in range(1, len(weights)):
            np.subtract(np.multiply(sample, weights[source], out=behind), counts[source], out=behind)
            np.greater(behind, best, out=further)
            np.maximum(choice, np.multiply(further, small(source), out=found), out=choice)
            if source < len(weights) - 1:
                np.maximum(best, behind, out=best)
        np.add(np.multiply(choice, lanes, out=place, dtype=np.int64), lane, out=place)
        flat.take(place, out=number, mode="clip")  # they are in range; "raise" would copy
        flat[place] = number + 1
        if row == _BLOCK - 1 or step == length - 1:
            yield step - row, which[: row + 1], numbers[: row + 1]


@dataclass(frozen=True)
class MegatronBlend:
    """A finished order of K data sets: sample i is sample dataset_sample_index[i] of set dataset_index[i]."""

    weights: tuple[float, ...]
    indexes: Mapping[str, np.ndarray]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(data set, its sample number), each (len,) int64."""
        which, numbers = (self.indexes[name][indices].astype(np.int64) for name in BLEND_INDEXES)
        return which, numbers

    def counts(self, samples: int) -> np.ndarray:
        """(K,): how many of the first `samples` each data set gives."""
        which = self.indexes[BLEND_INDEXES[0]]
        counts = np.zeros(len(self.weights), np.int64)
        for first in range(0, samples, _PIECE):
            counts += np.bincount(which[first : min(first + _PIECE, samples)], minlength=len(self.weights))
        return counts
