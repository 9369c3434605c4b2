"""Megatron-LM's sample order of one data set: the document, sample and shuffle index of megatron-core.

The sequences [first, last) of a data set are repeated for as many epochs as the samples need, shuffled, and
read as one long text (document index). The text is cut every S tokens (sample index): a sample is S inputs
and one more token as the last label. The samples are visited in a shuffled order (shuffle index). One
generator determines both shuffles. All epochs are shuffled together, except for a last epoch of which little
is read.
"""

from dataclasses import dataclass

import numpy as np

_ENOUGH = 0.8  # of an epoch's samples: a last epoch with fewer is shuffled separately


@dataclass(frozen=True)
class OrderSizes:
    """Lengths of the three indexes: arithmetic only.

    The order holds all samples of the fewest epochs that hold `requested` samples; None requests one epoch.
    """

    tokens: int  # per epoch
    seq_length: int
    requested: int | None

    @property
    def epochs(self) -> int:
        """The fewest epochs that hold the requested samples and the label of the last one."""
        if self.requested is None:
            return 1
        return max(1, -(-(self.requested * self.seq_length + 1) // self.tokens))

    @property
    def samples(self) -> int:
        """Samples of all epochs. Consecutive samples share a token; the remainder at the end is in none."""
        return self._samples_in(self.epochs)

    @property
    def shuffled_first(self) -> int:
        """Samples that are shuffled together; the others are those of a last epoch shuffled separately."""
        if self.requested is None or self.epochs == 1:
            return self.samples
        before = self._samples_in(self.epochs - 1)
        if self.requested - before >= int(_ENOUGH * self._samples_in(1)):
            return self.samples
        return before

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self.tokens - 1) // self.seq_length


def document_index(first: int, last: int, sizes: OrderSizes, random: np.random.RandomState) -> np.ndarray:
    """Return the sequences in the order of the text: (epochs · (last - first),) int32."""
    documents = np.tile(np.arange(first, last, dtype=np.int32), sizes.epochs)
    last_apart = sizes.shuffled_first < sizes.samples  # the last epoch is shuffled separately
    together = (sizes.epochs - last_apart) * (last - first)
    random.shuffle(documents[:together])
    random.shuffle(documents[together:])
    return documents


def shuffle_index(sizes: OrderSizes, random: np.random.RandomState) -> np.ndarray:
    """Return the order in which samples are visited: (samples,) uint32, or int64 for too many samples."""
    dtype = np.uint32 if sizes.samples < np.iinfo(np.uint32).max - 1 else np.int64
    cuts = np.arange(sizes.samples, dtype=dtype)
    random.shuffle(cuts[: sizes.shuffled_first])
    random.shuffle(cuts[sizes.shuffled_first :])
    return cuts


def sample_index(lengths: np.ndarray, documents: np.ndarray, seq_length: int) -> np.ndarray:
    """Return (document, token within it) at which each sample begins: (samples + 1, 2) int32 or int64.

    lengths (sequences,) int32; documents (D,) is the document index. The last row is the position of the last
    sample's label, where the next sample would begin. A sample begins in the document that holds its first
    token, so never in an empty one. The first sample is the exception: it begins at (0, 0) even if document 0
    is empty.
    """
    text = lengths[documents]
    ends = np.cumsum(text, dtype=np.int64)
    counts = np.diff(-(-ends // seq_length), prepend=0)  # of the samples that begin in each document
    dtype = np.int32 if len(documents) <= np.iinfo(np.int32).max else np.int64
    found = np.empty((counts.sum(), 2), dtype)
    found[:, 0] = np.repeat(np.arange(len(documents), dtype=dtype), counts)
    found[:, 1] = np.arange(len(found)) * seq_length - np.repeat(ends - text, counts)
    found[0] = 0
    return found
