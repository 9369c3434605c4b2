"""Megatron-LM's sample order of one data set: the document, sample and shuffle index of megatron-core.

The sequences [first, last) of a data set are repeated for as many epochs as the samples need, shuffled, and
read as one long text (document index). The text is cut every S tokens (sample index): a sample is S inputs
and one more token as the last label. The samples are visited in a shuffled order (shuffle index). One
generator determines both shuffles. All epochs are shuffled together, except for a last epoch of which little
is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 16  # documents processed at a time: their data stays in the processor's cache
_ENOUGH = 0.8  # of an epoch's samples: a last epoch with fewer is shuffled separately


@dataclass(frozen=True)
class OrderSizes:
    """Lengths of the three indexes: arithmetic only.

    The order holds all samples of the fewest epochs that hold `requested` samples; None requests one epoch.
    """

    tokens: int  # per epoch
    seq_length: int
    requested: int | None

    def __post_init__(self) -> None:
        assert self.tokens >= 1, "an epoch needs at least one token"
        assert self.seq_length >= 1, f"a sample needs at least one token, got {self.seq_length}"

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

    @property
    def last_apart(self) -> bool:
        """Whether the documents and samples of the last epoch are shuffled separately."""
        return self.shuffled_first < self.samples

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self.tokens - 1) // self.seq_length


def document_index(first: int, last: int, sizes: OrderSizes, random: np.random.RandomState) -> np.ndarray:
    """Return the sequences in the order of the text: (epochs · (last - first),) int32."""
    documents = np.tile(np.arange(first, last, dtype=np.int32), sizes.epochs)
    together = (sizes.epochs - 1 if sizes.last_apart else sizes.epochs) * (last - first)
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


def sample_index_dtype(documents: int) -> np.dtype:
    """Return the dtype of a sample index over `documents` documents."""
    return np.dtype(np.int32 if documents <= np.iinfo(np.int32).max else np.int64)


def sample_index(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int, rows: int
) -> Iterator[np.ndarray]:
    """Yield (document, token within it) at which each sample begins: (rows, 2), in pieces.

    lengths (sequences,) int32; documents (D,) is the document index. The last of samples + 1 rows is the
    position of the last sample's label, where the next sample would begin. A sample begins in the document
    that holds its first token, so never in an empty one. The first sample is the exception: it begins at
    (0, 0) even if document 0 is empty.
    """
    dtype = sample_index_dtype(len(documents))
    for first, begun, text, starts in _chunks(lengths, documents, seq_length, rows):
        # Samples begun[k] to begun[k + 1] begin in document k of the chunk.
        counts = np.diff(begun)
        piece = np.empty((begun[-1] - begun[0], 2), dtype)
        piece[:, 0] = np.repeat(np.arange(first, first + len(text)), counts)
        piece[:, 1] = np.arange(begun[0], begun[-1]) * seq_length - np.repeat(starts, counts)
        if begun[0] == 0:
            piece[:1] = 0
        yield piece


def _chunks(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int, rows: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield per chunk: first document, samples begun before it and by each end, lengths, starts."""
    position = begun_before = 0
    for first in range(0, len(documents), _CHUNK):
        text = lengths[documents[first : first + _CHUNK]]
        ends = position + np.cumsum(text, dtype=np.int64)
        begun = np.minimum((ends + (seq_length - 1)) // seq_length, rows)
        yield first, np.concatenate(([begun_before], begun)), text, ends - text
        position, begun_before = int(ends[-1]), int(begun[-1])
        if begun_before == rows:
            return
