"""The default sample order, and the data set that reads its samples.

The tokens of a split form a ring of T. Epoch e cuts it into W = T // S windows of S + 1 tokens, S inputs and
one more label, from a random offset on, and visits them in a random order. Sample i is a closed form of
(seed, i): there is no index to build or to cache, and any sample is as near as the first.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_zpp.data.file_array import FileArray
from megatron_zpp.data.fingerprint import fingerprint_of
from megatron_zpp.data.hashing import random_bits
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.permutation import permute
from megatron_zpp.data.samples import Epochs
from megatron_zpp.data.token_range_check import check_tokens

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


def order_seed(split_seed: int, stream: int) -> int:
    """The seed of a data set of a split: each has an order of its own."""
    return int(random_bits(split_seed, stream)[0])


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
    def name(self) -> str:
        """The data set as it was given."""
        return self.source.prefix

    def fingerprint(self) -> str:
        """What the data set is known by again."""
        return fingerprint_of(self.source)

    def with_seed(self, seed: int) -> "WindowDataset":
        """The same tokens in the order of another seed."""
        return replace(self, seed=seed)

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

    def epochs(self, samples: int) -> list[Epochs]:
        """How often so many samples read each data set."""
        return [Epochs(self.name, samples / self.windows_per_epoch)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers of 0 or more to (len, S + 1) int64.

        Raises ValueError for a token outside the vocabulary.
        """
        ring = self.source.tokens.part(self.first, self.last)
        starts = self.order.starts(indices)
        batch = read_windows(ring, starts, self.seq_length + 1)
        check_tokens(
            batch, self.vocab_size, self.source, lambda row, column: self._place(starts[row], column)
        )
        return batch

    def _place(self, start: int, column: int) -> int:
        return self.first + int(start + column) % (self.last - self.first)


def read_windows(ring: FileArray, starts: np.ndarray, length: int) -> np.ndarray:
    """As `cut_windows`, of a ring (T,) that lies in a file."""
    before_end = np.minimum(length, len(ring) - starts)
    if (before_end == length).all():
        found = ring.gather(starts, before_end)
    else:  # each window is what it has before the end, and what it has from the beginning
        firsts = np.stack([starts, np.zeros_like(starts)], axis=1)
        found = ring.gather(firsts.ravel(), np.stack([before_end, length - before_end], axis=1).ravel())
    return found.reshape(len(starts), length).astype(np.int64)


def cut_windows(ring: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """What stands in a ring from each start on: (T,) tokens, (len,) starts to (len, length <= T) int64."""
    batch = np.empty((len(starts), length), np.int64)
    for row, start in zip(batch, starts.tolist(), strict=True):
        straight = ring[start : start + length]
        row[: len(straight)] = straight
        row[len(straight) :] = ring[: length - len(straight)]
    return batch
