"""The order of the samples of a text, and the data set that reads them.

How many tokens a text has is known when all of it is tokenised, so that one permutation of all its windows
cannot be drawn before. An epoch here visits the blocks of a split in a random order and takes them a group at
a time; the tokens of a group form a ring, which is cut into windows and shuffled as `WindowOrder` does. So a
sample needs the counts of the groups before its own, which the cache keeps, and the tokens of its own. It
follows from the text, the tokenizer, the seed and its number, and from nothing else. Up to some 32 MB are one
group, whose windows are shuffled all together.
"""

import bisect
import math
from dataclasses import dataclass, replace

import numpy as np

from megatron_zpp.config.options import option_error
from megatron_zpp.data.samples import Epochs
from megatron_zpp.data.stateless_random import permute, random_bits
from megatron_zpp.data.text.cache import TokenCache
from megatron_zpp.data.text.sources import TextSource, fingerprint_of
from megatron_zpp.data.windows import WindowOrder, cut_windows

_BLOCKS, _WINDOWS = 0, 1  # what random bits decide
_AHEAD = 2.0  # times as fast as a group is read the next one is tokenised
_HELD = 2  # groups whose tokens stay in memory: a batch may end in another than it begins in


@dataclass(frozen=True)
class GroupOrder:
    """Which blocks of [first, last) make which group, counted on through all epochs; the arithmetic alone."""

    first: int
    last: int
    group: int  # blocks, at the least
    seed: int

    @property
    def groups(self) -> int:
        """Groups of an epoch."""
        return max(1, (self.last - self.first) // self.group)

    def blocks(self, number: int) -> np.ndarray:
        """The blocks of a group, in the order in which their tokens are joined."""
        epoch, place = divmod(number, self.groups)
        count = self.last - self.first
        edges = [count * edge // self.groups for edge in (place, place + 1)]
        return self.first + permute(np.arange(*edges), count, random_bits(self.seed, epoch, _BLOCKS))

    def windows(self, number: int, tokens: int, seq_length: int) -> WindowOrder:
        """The order inside a group of so many tokens, more than `seq_length`."""
        return WindowOrder(tokens, seq_length, int(random_bits(self.seed, number, _WINDOWS)[0]))


class TextDataset:
    """Samples of some blocks of a text, which are tokenised when they are needed, or shortly before."""

    def __init__(
        self, split: str, source: TextSource, cache: TokenCache, order: GroupOrder, seq_length: int
    ) -> None:
        """`split` is what they are called in a refusal."""
        self.name = source.name
        self._split = split
        self._source, self._cache, self._order, self._seq_length = source, cache, order, seq_length
        self._ends: list[int] = []  # the number of the first sample behind each group, as far as known
        self._rings: dict[int, np.ndarray] = {}  # by group
        self.windows_per_epoch: int | None = None

    def prepare(self, samples: int | None) -> None:
        """Has the first samples tokenised; None is an epoch, which is counted then, as is one of one group.

        Raises ValueError when a line holds no document, or a sample needs more tokens than there are.
        """
        if samples is None or self._order.groups == 1:
            self._cache.fill(
                np.concatenate([self._order.blocks(group) for group in range(self._order.groups)])
            )
            self._find_ends(groups=self._order.groups)
            self.windows_per_epoch = self._ends[-1]
        elif samples:
            self._find_ends(sample=samples - 1)

    def fingerprint(self) -> str:
        """What the text is known by again."""
        return fingerprint_of(self._source)

    def with_seed(self, seed: int) -> "TextDataset":
        """The same blocks in the order of another seed; where they are counted, also in that order."""
        order = replace(self._order, seed=seed)
        moved = TextDataset(self._split, self._source, self._cache, order, self._seq_length)
        if self.windows_per_epoch is not None:
            moved.prepare(None)
        return moved

    def describe(self) -> str:
        """One line for the head of a run."""
        text = self._source.describe(self._order.last - self._order.first)
        return f"{self.name}: {text}, tokenised as it is read, samples of {self._seq_length}"

    def epochs(self, samples: int) -> list[Epochs]:
        """How often so many samples read the text; about, as long as only some blocks are tokenised.

        Blocks are of about one size, and those that are tokenised first are drawn at random.
        """
        if self.windows_per_epoch:
            return [Epochs(self.name, samples / self.windows_per_epoch)]
        counts = self._cache.counts(np.arange(self._order.first, self._order.last))
        made = counts[counts >= 0]
        if not made.any():
            return []
        tokens = made.mean() * counts.size
        return [Epochs(self.name, samples * self._seq_length / tokens, about=made.size < counts.size)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers of 0 or more, at least one, to (len, S + 1) int64.

        Raises ValueError for a line that holds no document.
        """
        numbers = np.asarray(indices, np.int64)
        self._find_ends(sample=int(numbers.max()))
        groups = np.array([bisect.bisect_right(self._ends, number) for number in numbers.tolist()])
        batch = np.empty((len(numbers), self._seq_length + 1), np.int64)
        for group in np.unique(groups).tolist():
            ring, members = self._ring(group), groups == group
            windows = self._order.windows(group, ring.size, self._seq_length)
            starts = windows.starts(numbers[members] - self._begin(group))
            batch[members] = cut_windows(ring, starts, self._seq_length + 1)
        self._go_ahead(int(numbers.max()))
        return batch

    def _begin(self, group: int) -> int:
        return self._ends[group - 1] if group else 0

    def _find_ends(self, *, sample: int = -1, groups: int = 0) -> None:
        """Counts groups up to that of a sample, and at least so many."""
        while len(self._ends) < groups or not self._ends or self._ends[-1] <= sample:
            group = len(self._ends)
            tokens = int(self._cache.fill(self._order.blocks(group)).sum())
            windows = tokens // self._seq_length if tokens > self._seq_length else 0
            self._ends.append(self._begin(group) + windows)
            if group + 1 == self._order.groups and self._ends[-1] == 0:
                raise self._too_few()

    def _too_few(self) -> ValueError:
        """Of an epoch without a window."""
        tokens = int(self._cache.counts(np.arange(self._order.first, self._order.last)).sum())
        return option_error(
            "--seq-length",
            self._seq_length,
            f"one sample needs {self._seq_length + 1} tokens, but the {self._split} split of "
            f"{self.name} has {tokens}; give more text, a larger share in --split, or a shorter "
            "length",
        )

    def _ring(self, group: int) -> np.ndarray:
        if group not in self._rings:
            while len(self._rings) >= _HELD:
                del self._rings[next(iter(self._rings))]
            self._rings[group] = self._cache.tokens(self._order.blocks(group))
        return self._rings[group]

    def _go_ahead(self, sample: int) -> None:
        """Keeps the next group ahead of what is read of this one, so that no step waits for all of it."""
        group = bisect.bisect_right(self._ends, sample)
        begin = self._begin(group)
        read = (sample + 1 - begin) / (self._ends[group] - begin)
        blocks = self._order.blocks(group + 1)
        self._cache.go_ahead(blocks[: math.ceil(min(1.0, _AHEAD * read) * blocks.size)])
