"""The default sample order, and the data set that reads its samples.

The tokens of a split form a ring of T. Epoch e cuts it into W = T // S windows of S + 1 tokens, S inputs and
one more label, from a random offset on, and visits them in a random order. Sample i is a closed form of
(seed, i): there is no index to build or to cache, and any sample is as near as the first.
"""

from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.hashing import random_bits
from megatron_zpp.data.indexed import IndexedDataset, tokens_path
from megatron_zpp.data.permutation import permute

_OFFSET, _ORDER = 0, 1  # what the random bits of an epoch decide


@dataclass(frozen=True)
class WindowOrder:
    """Where each sample begins in a ring of `tokens`; the arithmetic alone."""

    tokens: int  # T
    seq_length: int  # S
    seed: int

    def __post_init__(self) -> None:
        assert self.seq_length >= 1, f"a window has at least one token, not {self.seq_length}"
        assert self.tokens > self.seq_length, f"{self.tokens} tokens hold no window of {self.seq_length} + 1"

    @property
    def windows_per_epoch(self) -> int:
        """W."""
        return self.tokens // self.seq_length

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """First token of each sample, in [0, T): (len,) integers of 0 or more to (len,) int64."""
        epochs, positions = np.divmod(np.asarray(indices, np.int64), self.windows_per_epoch)
        offsets = random_bits(self.seed, epochs, _OFFSET) % np.uint64(self.tokens)
        windows = permute(positions, self.windows_per_epoch, random_bits(self.seed, epochs, _ORDER))
        return (offsets.astype(np.int64) + windows * self.seq_length) % self.tokens


@dataclass(frozen=True)
class WindowDataset:
    """Samples of the tokens [first, last) of an indexed data set, in the order of `WindowOrder`."""

    source: IndexedDataset
    first: int
    last: int
    seq_length: int
    vocab_size: int
    seed: int

    @property
    def order(self) -> WindowOrder:
        """Which sample begins where, from `first` on."""
        return WindowOrder(self.last - self.first, self.seq_length, self.seed)

    @property
    def windows_per_epoch(self) -> int:
        """Samples after which each token has been an input once, but for fewer than S of them."""
        return self.order.windows_per_epoch

    def describe(self) -> str:
        """One line for the head of a run."""
        return (
            f"{self.source.prefix}: {self.last - self.first:,} tokens, "
            f"{self.windows_per_epoch:,} samples of {self.seq_length}"
        )

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers of 0 or more to (len, S + 1) int64.

        Raises ValueError for a token outside the vocabulary.
        """
        ring = self.source.tokens[self.first : self.last]
        starts = self.order.starts(indices)
        batch = np.empty((len(starts), self.seq_length + 1), np.int64)
        for row, start in zip(batch, starts.tolist(), strict=True):
            straight = ring[start : start + len(row)]
            row[: len(straight)] = straight
            row[len(straight) :] = ring[: len(row) - len(straight)]
        if batch.size and not (batch.min() >= 0 and batch.max() < self.vocab_size):
            self._refuse_token(batch, starts)
        return batch

    def _refuse_token(self, batch: np.ndarray, starts: np.ndarray) -> None:
        row, column = np.argwhere((batch < 0) | (batch >= self.vocab_size))[0]
        position = self.first + int(starts[row] + column) % (self.last - self.first)
        raise ValueError(
            f"{tokens_path(self.source.prefix)}: byte {position * self.source.dtype.itemsize}: token "
            f"{position} is {batch[row, column]}, outside the vocabulary of {self.vocab_size}; "
            "give the tokenizer that made the data set"
        )
