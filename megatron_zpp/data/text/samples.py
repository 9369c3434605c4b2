"""The order of the samples of a text, and the data set that reads samples in it: see docs/internals/data.md.

The tokens of a group of blocks form a ring, which `WindowOrder` cuts into windows and shuffles. Reading a
sample requires the token counts of all groups before its own, which the cache keeps, and the tokens of its
own group. A sample depends only on the text, the tokenizer, the seed and its number.
"""

import bisect
import math

import numpy as np

from megatron_zpp.config.options import option_error
from megatron_zpp.config.words import counted
from megatron_zpp.data.samples import Epochs, KnownSamples
from megatron_zpp.data.text.cache import TokenCache
from megatron_zpp.data.text.sources import TextSource

_AHEAD = 2.0  # fraction of the next group tokenised per fraction of this group read
_HELD = 2  # groups whose tokens stay in memory, because a batch may span two groups


class TextDataset(KnownSamples):
    """Samples of the blocks [first, last) of a text, tokenised when they are needed or shortly before.

    The first `prepared` are tokenised at once: see `prepare`. `split` names the samples in errors.
    """

    source: TextSource
    windows_per_epoch: int | None = None

    def __init__(
        self,
        split: str,
        cache: TokenCache,
        blocks: tuple[int, int],
        seq_length: int,
        seed: int,
        prepared: int | None,
    ) -> None:
        self._split, self._blocks, self._seq_length = split, blocks, seq_length
        self.source, self._cache = cache.source, cache
        self._order = cache.source.order(*blocks, seq_length, seed)
        self._ends: list[int] = []  # number of the first sample after each group, as far as known
        self._rings: dict[int, np.ndarray] = {}  # by group
        self.prepare(prepared)

    def prepare(self, samples: int | None) -> None:
        """Tokenise the first `samples` samples, an epoch if None.

        An epoch of one group is tokenised as a whole. `windows_per_epoch` is known after that. Raises
        ValueError if a line holds no document, or if there are fewer tokens than a sample needs.
        """
        if samples is None or self._order.groups == 1:
            groups = range(self._order.groups)
            self._cache.fill(np.concatenate([self._order.blocks(group) for group in groups]))
            self._find_ends(groups=self._order.groups)
            self.windows_per_epoch = self._ends[-1]
        elif samples:
            self._find_ends(sample=samples - 1)

    def with_seed(self, seed: int) -> "TextDataset":
        """Return the same blocks in the order of another seed, counted if these are counted."""
        prepared = 0 if self.windows_per_epoch is None else None
        return TextDataset(self._split, self._cache, self._blocks, self._seq_length, seed, prepared)

    def describe(self) -> str:
        text = self.source.describe(self._order.last - self._order.first)
        skipped = self._cache.skipped(np.arange(self._order.first, self._order.last))
        so_far = f", {counted(skipped, 'bad line')} skipped so far" if skipped else ""
        return f"{self.source.name}: {text}, tokenised as it is read, samples of {self._seq_length}{so_far}"

    def epochs(self, samples: int) -> list[Epochs]:
        """How often the first `samples` samples read the text; an estimate until all blocks are tokenised.

        The estimate is good, because blocks have similar sizes and are tokenised in a random order.
        """
        if self.windows_per_epoch:
            return [Epochs(self.source.name, samples / self.windows_per_epoch)]
        counts = self._cache.counts(np.arange(self._order.first, self._order.last))
        known = counts[counts >= 0]
        if not known.any():
            return []
        tokens = known.mean() * counts.size
        return [Epochs(self.source.name, samples * self._seq_length / tokens, about=known.size < counts.size)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number, at least one."""
        numbers = np.asarray(indices, np.int64)
        self._find_ends(sample=int(numbers.max()))
        groups = np.array([bisect.bisect_right(self._ends, number) for number in numbers.tolist()])
        batch = np.empty((len(numbers), self._seq_length + 1), np.int64)
        for group in np.unique(groups).tolist():
            ring, members = self._ring(group), groups == group
            windows = self._order.windows(group, ring.size, self._seq_length)
            starts = windows.starts(numbers[members] - self._begin(group))
            batch[members] = ring[(starts[:, None] + np.arange(self._seq_length + 1)) % ring.size]
        self._prefetch(int(numbers.max()))
        return batch

    def _begin(self, group: int) -> int:
        return self._ends[group - 1] if group else 0

    def _find_ends(self, *, sample: int = -1, groups: int = 0) -> None:
        """Count the groups up to the one of `sample`, and at least `groups` of them."""
        while len(self._ends) < groups or not self._ends or self._ends[-1] <= sample:
            group = len(self._ends)
            tokens = int(self._cache.fill(self._order.blocks(group)).sum())
            windows = tokens // self._seq_length if tokens > self._seq_length else 0
            self._ends.append(self._begin(group) + windows)
            if group + 1 == self._order.groups and self._ends[-1] == 0:
                raise self._too_few()

    def _too_few(self) -> ValueError:
        tokens = int(self._cache.counts(np.arange(self._order.first, self._order.last)).sum())
        has = f"the {self._split} split of {self.source.name} has {tokens}"
        fix = "give more text, a larger share in --split, or a shorter length"
        needs = f"one sample needs {self._seq_length + 1} tokens, but {has}; {fix}"
        return option_error("--seq-length", self._seq_length, needs)

    def _ring(self, group: int) -> np.ndarray:
        if group not in self._rings:
            while len(self._rings) >= _HELD:
                del self._rings[next(iter(self._rings))]
            self._rings[group] = self._cache.tokens(self._order.blocks(group))
        return self._rings[group]

    def _prefetch(self, sample: int) -> None:
        """Tokenise the next group while this one is read, so that no step waits for a whole group."""
        group = bisect.bisect_right(self._ends, sample)
        begin = self._begin(group)
        read = (sample + 1 - begin) / (self._ends[group] - begin)
        blocks = self._order.blocks(group + 1)
        self._cache.prefetch(blocks[: math.ceil(min(1.0, _AHEAD * read) * blocks.size)])
