"""The default sample order, and the data set that reads samples in it.

The T tokens of a split form a ring. Epoch e cuts the ring at a random offset into W = T // S windows of S + 1
tokens (S inputs, and one more token as the last label) and visits them in a random order. Sample i is a
closed form of (seed, i): there is no index to build or to cache, and any sample is found as fast as the
first.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.samples import Epochs, KnownSamples
from megatron_zpp.data.stateless_random import permute, random_bits

_OFFSET, _PERMUTATION = 0, 1  # uses of an epoch's random bits
_Order = TypeVar("_Order", bound="RandomOrder")


@dataclass(frozen=True)
class WindowOrder:
    """Where each sample begins in a ring of `tokens`: arithmetic only."""

    tokens: int  # T, more than S
    seq_length: int  # S
    seed: int

    @property
    def windows_per_epoch(self) -> int:
        """W."""
        return self.tokens // self.seq_length

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Return the first token of each sample, in [0, T): (len,) integers of 0 or more to (len,) int64."""
        epochs, positions = np.divmod(np.asarray(indices, np.int64), self.windows_per_epoch)
        offsets = random_bits(self.seed, epochs, _OFFSET) % np.uint64(self.tokens)
        windows = permute(positions, self.windows_per_epoch, random_bits(self.seed, epochs, _PERMUTATION))
        return (offsets.astype(np.int64) + windows * self.seq_length) % self.tokens


def order_seed(split_seed: int, stream: int) -> int:
    """Return the seed of data set number `stream` of a split: every data set has a different order."""
    return int(random_bits(split_seed, stream)[0])


@dataclass(frozen=True)
class RandomOrder(KnownSamples):
    """Samples of an indexed data set in a random order, another one in each epoch."""

    source: IndexedDataset
    seed: int = field(kw_only=True)

    def with_seed(self: _Order, seed: int) -> _Order:
        return replace(self, seed=seed)

    @property
    @abstractmethod
    def windows_per_epoch(self) -> int: ...

    def epochs(self, samples: int) -> list[Epochs]:
        return [Epochs(self.source.name, samples / self.windows_per_epoch)]


@dataclass(frozen=True)
class WindowDataset(RandomOrder):
    """Samples of the tokens [first, last) of an indexed data set, in the order of `WindowOrder`."""

    first: int
    last: int
    seq_length: int
    vocab_size: int

    @property
    def order(self) -> WindowOrder:
        """The order of samples; positions count from token `first`."""
        return WindowOrder(self.last - self.first, self.seq_length, self.seed)

    @property
    def windows_per_epoch(self) -> int:
        """Samples after which every token has been an input once, except for fewer than S tokens."""
        return self.order.windows_per_epoch

    def describe(self) -> str:
        return (
            f"{self.source.prefix}: {self.last - self.first:,} tokens, "
            f"{self.windows_per_epoch:,} samples of {self.seq_length}"
        )

    def batch(self, indices: np.ndarray) -> np.ndarray:
        length, starts = self.seq_length + 1, self.first + self.order.starts(indices)
        lengths = np.minimum(length, self.last - starts)
        if (lengths < length).any():  # with a second part, from the beginning of the ring
            starts = np.stack([starts, np.full_like(starts, self.first)], axis=1).ravel()
            lengths = np.stack([lengths, length - lengths], axis=1).ravel()
        return self.source.read(starts, lengths, self.vocab_size).reshape(len(indices), length)
