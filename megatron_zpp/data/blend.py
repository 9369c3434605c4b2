"""Mixes data sets by weight, in closed form: sample i is sample n of data set k."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

import numpy as np

from megatron_zpp.data.samples import Epochs, KnownSamples, Samples


@dataclass(frozen=True)
class BlendOrder(ABC):
    """An order in which K data sets take turns."""

    weights: tuple[float, ...]  # of the data sets, (K,)

    @abstractmethod
    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (data set, its sample number), each (len,) int64, for (len,) sample numbers."""

    @abstractmethod
    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` come from each data set: (K,) int64."""


@dataclass(frozen=True)
class Blend(BlendOrder):
    """The order in which data sets take turns by weight, for sample numbers in [since, since + 2^62].

    All weights are above 0. `consumed_before` counts the samples of each data set before sample `since`; by
    default there are none.

    The data sets are the leaves of a binary tree of depth d = ceil(log2 K). Let p be the left child's share
    of a node's weight. Of the first j samples that reach the node, C(j) = floor(j·p + 1/2) go left and j -
    C(j) go right. So sample j goes left if C(j+1) > C(j), and is then number C(j) on the left; otherwise it
    is number j - C(j) on the right. C grows by at most 1 per sample, because p < 1.

    Bound: |C(j) - j·p| <= 1/2, and likewise on the right. If a node's count differs from its exact share of i
    samples by at most e, the count of a child with share q < 1 of the node differs by at most e·q + 1/2. At
    the root e = 0, so after any number of samples each data set is within d/2 samples of its share. (p has 64
    bits, which adds d·i/2^64: below 2^-19 for i up to 2^40 and 32 data sets.)
    """

    since: int = 0
    consumed_before: tuple[int, ...] = ()

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        which = np.zeros(len(indices), np.int64)
        numbers = (np.asarray(indices) - self.since).astype(np.uint64)
        pending = [(0, len(self.weights), np.arange(len(indices)))]  # a node, and the samples that reach it
        while pending:
            first, last, members = pending.pop()
            if last - first == 1 or not members.size:
                which[members] = first
                continue
            middle = (first + last) // 2
            part, arrived = self._left_parts[first, last], numbers[members]
            before = _rounded_product(arrived, part)
            left = _rounded_product(arrived + np.uint64(1), part) > before
            numbers[members] = np.where(left, before, arrived - before)
            pending += [(first, middle, members[left]), (middle, last, members[~left])]
        return which, numbers.astype(np.int64) + self._before[which]

    def counts(self, samples: int) -> np.ndarray:
        arrived = {(0, len(self.weights)): np.array([samples - self.since], np.uint64)}  # at each node
        for (first, last), part in self._left_parts.items():
            middle, here = (first + last) // 2, arrived.pop((first, last))
            arrived[first, middle] = left = _rounded_product(here, part)
            arrived[middle, last] = here - left
        return self._before + np.concatenate([arrived[leaf] for leaf in sorted(arrived)]).astype(np.int64)

    @cached_property
    def _before(self) -> np.ndarray:
        return np.array(self.consumed_before or [0] * len(self.weights), np.int64)

    @cached_property
    def _left_parts(self) -> dict[tuple[int, int], int]:
        """p of each inner node [first, last) in units of 2^-64; never 0 or 1, however small a weight is.

        A node comes before those below it.
        """
        running = [Fraction(0), *accumulate(map(Fraction, self.weights))]
        parts, pending = {}, [(0, len(self.weights))]
        while pending:
            first, last = pending.pop()
            if last - first > 1:
                middle = (first + last) // 2
                part = (running[middle] - running[first]) / (running[last] - running[first])
                parts[first, last] = min(max(round(part * 2**64), 1), 2**64 - 1)
                pending += [(first, middle), (middle, last)]
        return parts


class Concatenation(BlendOrder):
    """The order that reads data sets one after another; a weight is the number of samples of its data set."""

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths, numbers = np.array(self.weights, np.int64), np.asarray(indices, np.int64)
        ends = np.cumsum(lengths)
        which = np.searchsorted(ends, numbers, side="right")
        return which, numbers - (ends - lengths)[which]

    def counts(self, samples: int) -> np.ndarray:
        lengths = np.array(self.weights, np.int64)
        return np.clip(samples - (np.cumsum(lengths) - lengths), 0, lengths)


@dataclass(frozen=True)
class BlendedDataset(Samples):
    sources: tuple[KnownSamples, ...]
    blend: BlendOrder

    @property
    def windows_per_epoch(self) -> int | None:
        """The sum over the sources, None if one of them does not know its own.

        By then a source of a `Blend` whose weight exceeds its share of the tokens has repeated.
        """
        known = [each for source in self.sources if (each := source.windows_per_epoch) is not None]
        return sum(known) if len(known) == len(self.sources) else None

    def describe(self) -> str:
        total = sum(self.blend.weights)
        parts = zip(self.blend.weights, self.sources, strict=True)
        return "; ".join(f"{weight / total:.2%} {source.describe()}" for weight, source in parts)

    def epochs(self, samples: int) -> list[Epochs]:
        counts = self.blend.counts(samples).tolist()
        parts = zip(self.sources, counts, strict=True)
        return [each for source, count in parts for each in source.epochs(count)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number, at least one, as the sources return them."""
        which, numbers = self.blend.locate(indices)
        pieces = [self.sources[source].batch(numbers[which == source]) for source in np.unique(which)]
        by_source = np.argsort(which, kind="stable")
        return np.concatenate(pieces)[np.argsort(by_source)]


def _rounded_product(numbers: np.ndarray, part: int) -> np.ndarray:
    """Return floor(numbers · part / 2^64 + 1/2), exactly, by Python's integers: (len,) uint64 to the same."""
    return ((numbers.astype(object) * part + (1 << 63)) >> 64).astype(np.uint64)
