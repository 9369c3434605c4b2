"""Samples of data sets in Megatron-LM's order and blend; the indexes are cached on disk."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.file_array import FileArray
from megatron_zpp.data.indexed import IndexedDataset, IndexedSamples, index_path
from megatron_zpp.data.megatron.blend import (
    BLEND_INDEXES,
    MegatronBlend,
    blend_pieces,
    exhaustive_order,
    number_dtype,
)
from megatron_zpp.data.megatron.order import (
    OrderSizes,
    document_index,
    sample_index,
    sample_index_dtype,
    shuffle_index,
)
from megatron_zpp.data.npy_files import NpyWriter
from megatron_zpp.data.order_cache import CachedArrays, OrderCache, contents_of
from megatron_zpp.data.samples import Epochs

_INDEXES = ("document_index", "sample_index", "shuffle_index")
_VERSION = 2  # of the cached indexes


@dataclass(frozen=True)
class MegatronDataset(IndexedSamples):
    """A finite number of samples, given by `sizes`, of the sequences [first, last) of a data set.

    `indexes` has document_index (D,), sample_index (samples + 1, 2) and shuffle_index (samples,): see
    order.py.
    """

    first: int
    last: int
    sizes: OrderSizes
    vocab_size: int
    indexes: CachedArrays

    def __len__(self) -> int:
        return self.sizes.samples

    @property
    def windows_per_epoch(self) -> int:
        """Samples per epoch."""
        return (self.sizes.tokens - 1) // self.sizes.seq_length

    def describe(self) -> str:
        """One line for the head of the log."""
        return (
            f"{self.source.prefix}: {self.sizes.tokens:,} tokens, {len(self):,} samples of "
            f"{self.sizes.seq_length} in Megatron-LM's order"
        )

    def epochs(self, samples: int) -> list[Epochs]:
        """How often the first `samples` samples read the data set."""
        return [Epochs(self.name, samples * self.sizes.seq_length / self.sizes.tokens)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers in [0, samples) to (len, S + 1) int64.

        Raises ValueError for a token outside the vocabulary.
        """
        cuts = self.indexes["shuffle_index"][indices].astype(np.int64)
        begins, lengths = self._pieces(cuts)
        tokens = self.source.tokens.gather(begins, lengths)
        batch = tokens.reshape(len(cuts), self.sizes.seq_length + 1).astype(np.int64)
        self.source.check_token_ids(
            batch, self.vocab_size, lambda row, column: self._position(cuts[row], column)
        )
        return batch

    def _pieces(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token in PREFIX.bin and the length of every piece of the samples, in order.

        (len,) int64 to two (pieces,) int64; a sample has one piece per document that it touches.
        """
        two = np.full(len(cuts), 2)
        # (len, 2): positions in the document index, and tokens within the document, of a sample's first token
        # and of its last label, which is the first token of the next sample
        edges = self.indexes["sample_index"].gather(cuts, two).astype(np.int64).reshape(len(cuts), 2, 2)
        positions, within = edges[:, :, 0], edges[:, :, 1]
        counts = positions[:, 1] - positions[:, 0] + 1  # documents of each sample
        documents = self.indexes["document_index"].gather(positions[:, 0], counts).astype(np.int64)
        starts, ends = self.source.token_ranges(documents)
        lasts = np.cumsum(counts) - 1
        ends[lasts] = starts[lasts] + within[:, 1] + 1
        starts[lasts - counts + 1] += within[:, 0]
        return starts, ends - starts

    def _position(self, cut: int, column: int) -> int:
        pieces = zip(*self._pieces(np.array([cut])), strict=True)
        return int(np.concatenate([np.arange(begin, begin + length) for begin, length in pieces])[column])


@dataclass(frozen=True)
class MegatronOrders:
    """Builds data sets and blends in the order that Megatron-LM would use for the same flags."""

    cache: OrderCache
    seq_length: int
    vocab_size: int
    seed: int

    def dataset(
        self, source: IndexedDataset, first: int, last: int, requested: int | None, split: str
    ) -> MegatronDataset:
        """Return `requested` samples of the sequences [first, last); None requests one epoch."""
        sizes = OrderSizes(_total(source.lengths.part(first, last)), self.seq_length, requested)
        made_of = {
            "version": _VERSION,
            "indexes": _INDEXES,
            "file": contents_of(index_path(source.local)),
            "sequences": [first, last],
            "seq_length": self.seq_length,
            "epochs": sizes.epochs,
            "shuffled_first": sizes.shuffled_first,
            "seed": self.seed,
        }

        def build(files: NpyWriter) -> None:
            _build_indexes(source.lengths[:], first, last, sizes, self.seed, files)

        what = f"the {split} order of {source.prefix}, {sizes.samples:,} samples"
        indexes = self.cache.get(made_of, _INDEXES, build, what)
        return MegatronDataset(source, first, last, sizes, self.vocab_size, indexes)

    def blend(
        self, sources: Sequence[MegatronDataset], weights: Sequence[float], size: int | None, split: str
    ) -> BlendedDataset:
        """Return `size` samples of the sources by `weights`; None draws every sample of each source once."""
        shares = normalized(np.array(weights, np.float64))
        made_of: dict[str, Any] = {"version": _VERSION, "indexes": BLEND_INDEXES, "size": size}
        order: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
        if size is None:
            lengths = np.array([len(source) for source in sources])
            made_of |= {"lengths": lengths.tolist()}
            size, order = int(lengths.sum()), lambda: [exhaustive_order(lengths)]
        else:
            made_of |= {"weights": shares.tolist()}
            order = partial(blend_pieces, shares, size)
        what = f"the {split} blend of {len(sources)} data sets, {size:,} samples"
        arrays = self.cache.get(made_of, BLEND_INDEXES, partial(_build_blend, order, size), what)
        return BlendedDataset(tuple(sources), MegatronBlend(tuple(shares.tolist()), arrays))


def normalized(weights: np.ndarray) -> np.ndarray:
    """Return (K,) float64 divided by its sum; numpy's order of summation determines the last bit."""
    return weights / np.sum(weights)


def _total(lengths: FileArray) -> int:
    return sum(int(chunk.sum(dtype=np.int64)) for chunk in lengths.chunks())


def _build_indexes(
    lengths: np.ndarray, first: int, last: int, sizes: OrderSizes, seed: int, files: NpyWriter
) -> None:
    random = np.random.RandomState(seed)
    documents = document_index(first, last, sizes, random)
    files.save("document_index", documents)
    rows = sizes.samples + 1
    with files.open("sample_index", sample_index_dtype(len(documents)), (rows, 2)) as write:
        for piece in sample_index(lengths, documents, sizes.seq_length, rows):
            write(piece)
    del documents
    files.save("shuffle_index", shuffle_index(sizes, random))


def _build_blend(
    order: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]], size: int, files: NpyWriter
) -> None:
    """Write the two indexes, which `order` returns piece by piece."""
    which, numbers = BLEND_INDEXES
    with (
        files.open(which, np.int16, (size,)) as write_which,
        files.open(numbers, number_dtype(size), (size,)) as write_numbers,
    ):
        for piece in order():
            write_which(piece[0])
            write_numbers(piece[1])
