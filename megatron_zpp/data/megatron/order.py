"""Megatron-LM's sample order of one data set: the document, sample and shuffle index of megatron-core.

The sequences [first, last) of a data set, repeated for as many epochs as the samples need and shuffled, are
one long text (document index). It is cut every S tokens (sample index), a sample being S inputs and one more
label, and the cuts are visited in a shuffled order (shuffle index). One generator decides both shuffles, and
epochs are shuffled together, but for a last one of which little is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.megatron.compiled_orders import CompiledOrders

_CHUNK = 1 << 16  # documents handled at a time: what is done with them stays in the processor's cache
_ENOUGH = 0.8  # of an epoch's samples: a last one of fewer is shuffled on its own


@dataclass(frozen=True)
class OrderSizes:
    """How long the three indexes are; the arithmetic alone.

    `requested` is how many samples are asked for: the epochs are the fewest that have them, and all their
    samples are in the order. None asks for one epoch.
    """

    tokens: int  # of an epoch
    seq_length: int
    requested: int | None

    def __post_init__(self) -> None:
        assert self.tokens >= 1, "an epoch of no tokens never ends"
        assert self.seq_length >= 1, f"a sample has at least one token, not {self.seq_length}"

    @property
    def epochs(self) -> int:
        """The fewest that hold the samples asked for, and the last one's label."""
        if self.requested is None:
            return 1
        return max(1, -(-(self.requested * self.seq_length + 1) // self.tokens))

    @property
    def samples(self) -> int:
        """Of all epochs; consecutive ones share a token, and what is left at the end is in none."""
        return self._samples_in(self.epochs)

    @property
    def shuffled_first(self) -> int:
        """Samples that are shuffled together; the others are those of a last epoch on its own."""
        before = self._samples_in(self.epochs - 1)
        if self.epochs == 1 or self.requested - before >= int(_ENOUGH * self._samples_in(1)):
            return self.samples
        return before

    @property
    def last_apart(self) -> bool:
        """Whether the last epoch's documents and samples are shuffled on their own."""
        return self.shuffled_first < self.samples

    def _samples_in(self, epochs: int) -> int:
        return (epochs * self.tokens - 1) // self.seq_length


def document_index(
    first: int,
    last: int,
    sizes: OrderSizes,
    random: np.random.RandomState,
    compiled: CompiledOrders | None = None,
) -> np.ndarray:
    """(epochs · (last - first),) int32: the sequences in the order in which they make up the text."""
    apart, width = int(sizes.last_apart), last - first
    documents = np.tile(np.arange(first, last, dtype=np.int32), sizes.epochs)
    _shuffle(documents[: (sizes.epochs - apart) * width], random, compiled)
    _shuffle(documents[(sizes.epochs - apart) * width :], random, compiled)
    return documents


def shuffle_index(
    sizes: OrderSizes, random: np.random.RandomState, compiled: CompiledOrders | None = None
) -> np.ndarray:
    """(samples,) uint32, or int64 where these do not suffice: which cut is visited when."""
    dtype = np.uint32 if sizes.samples < np.iinfo(np.uint32).max - 1 else np.int64
    cuts = np.arange(sizes.samples, dtype=dtype)
    _shuffle(cuts[: sizes.shuffled_first], random, compiled)
    _shuffle(cuts[sizes.shuffled_first :], random, compiled)
    return cuts


def sample_index_dtype(documents: int) -> np.dtype:
    """Of a sample index over so many documents."""
    return np.dtype(np.int32 if documents <= np.iinfo(np.int32).max else np.int64)


def sample_index(
    lengths: np.ndarray,
    documents: np.ndarray,
    seq_length: int,
    rows: int,
    compiled: CompiledOrders | None = None,
) -> Iterator[np.ndarray]:
    """The document and the token in it at which each sample begins: (rows, 2), in pieces.

    lengths (sequences,) int32; documents (D,) their order. The last of samples + 1 rows is where a next
    sample would begin, which is the last one's label. A sample begins in the document that holds its first
    token, so never in an empty one; only the first is said to begin at (0, 0) whatever stands there.
    """
    dtype = sample_index_dtype(len(documents))
    if compiled:
        yield from compiled.sample_rows(lengths, documents, seq_length, rows, dtype)
        return
    for first, begun, text, starts in _chunks(lengths, documents, seq_length, rows):
        # Document k of the chunk holds the beginnings of the samples begun[k] to begun[k + 1].
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
    """Of each chunk: first document, samples begun before its start and each end, lengths, starts."""
    position = begun_before = 0
    for first in range(0, len(documents), _CHUNK):
        text = lengths[documents[first : first + _CHUNK]]
        ends = position + np.cumsum(text, dtype=np.int64)
        begun = np.minimum((ends + (seq_length - 1)) // seq_length, rows)
        yield first, np.concatenate(([begun_before], begun)), text, ends - text
        position, begun_before = int(ends[-1]), int(begun[-1])
        if begun_before == rows:
            return


def _shuffle(values: np.ndarray, random: np.random.RandomState, compiled: CompiledOrders | None) -> None:
    """Draws do not depend on what is shuffled."""
    if compiled:
        compiled.shuffle(values, random)
    else:
        random.shuffle(values)
