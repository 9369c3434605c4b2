"""Samples of data sets in Megatron-LM's order and blend, by indexes that come from a cache."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from megatron_zpp.data.array_files import ArrayFiles
from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.file_array import FileArray
from megatron_zpp.data.fingerprint import fingerprint_of
from megatron_zpp.data.indexed import IndexedDataset, index_path
from megatron_zpp.data.megatron.blend import BLEND_INDEXES, MegatronBlend, blend_pieces, exhaustive_order
from megatron_zpp.data.megatron.compiled_orders import CompiledOrders
from megatron_zpp.data.megatron.order import (
    OrderSizes,
    document_index,
    sample_index,
    sample_index_dtype,
    shuffle_index,
)
from megatron_zpp.data.order_cache import CachedArrays, OrderCache, contents_of
from megatron_zpp.data.samples import Epochs
from megatron_zpp.data.token_range_check import check_tokens

_INDEXES = ("document_index", "sample_index", "shuffle_index")
_VERSION = 2  # of what is cached


@dataclass(frozen=True)
class MegatronDataset:
    """The samples of `sizes` of the sequences [first, last) of a data set; numbered from 0, and finite.

    `indexes` has document_index (D,), sample_index (samples + 1, 2) and shuffle_index (samples,): see
    megatron_order.py.
    """

    source: IndexedDataset
    first: int
    last: int
    sizes: OrderSizes
    vocab_size: int
    indexes: CachedArrays

    @property
    def name(self) -> str:
        """The data set as it was given."""
        return self.source.prefix

    def fingerprint(self) -> str:
        """What the data set is known by again."""
        return fingerprint_of(self.source)

    def __len__(self) -> int:
        return self.sizes.samples

    @property
    def windows_per_epoch(self) -> int:
        """Samples of one epoch."""
        return (self.sizes.tokens - 1) // self.sizes.seq_length

    def describe(self) -> str:
        """One line for the head of a run."""
        return (
            f"{self.source.prefix}: {self.sizes.tokens:,} tokens, {len(self):,} samples of "
            f"{self.sizes.seq_length} in Megatron-LM's order"
        )

    def epochs(self, samples: int) -> list[Epochs]:
        """How often so many samples read each data set."""
        return [Epochs(self.name, samples * self.sizes.seq_length / self.sizes.tokens)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers in [0, samples) to (len, S + 1) int64.

        Raises ValueError for a token outside the vocabulary.
        """
        cuts = self.indexes["shuffle_index"][indices].astype(np.int64)
        begins, lengths = self._pieces(cuts)
        tokens = self.source.tokens.gather(begins, lengths)
        batch = tokens.reshape(len(cuts), self.sizes.seq_length + 1).astype(np.int64)
        check_tokens(batch, self.vocab_size, self.source, lambda row, column: self._place(cuts[row], column))
        return batch

    def _pieces(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token in PREFIX.bin and length of what makes up the samples, one piece after the other.

        (len,) int64 to two (pieces,) int64; a sample has a piece of each document that it touches.
        """
        two = np.full(len(cuts), 2)
        # (len, 2): of a sample's first token, and of its label, which the next sample begins with, the place
        # in the document index and the token within that document
        edges = self.indexes["sample_index"].gather(cuts, two).astype(np.int64).reshape(len(cuts), 2, 2)
        places, within = edges[:, :, 0], edges[:, :, 1]
        counts = places[:, 1] - places[:, 0] + 1  # documents of each sample
        documents = self.indexes["document_index"].gather(places[:, 0], counts).astype(np.int64)
        starts, ends = self.source.token_ranges(documents)
        lasts = np.cumsum(counts) - 1
        ends[lasts] = starts[lasts] + within[:, 1] + 1
        starts[lasts - counts + 1] += within[:, 0]
        return starts, ends - starts

    def _place(self, cut: int, column: int) -> int:
        pieces = zip(*self._pieces(np.array([cut])), strict=True)
        return int(np.concatenate([np.arange(begin, begin + length) for begin, length in pieces])[column])


@dataclass(frozen=True)
class MegatronOrders:
    """Builds what a run reads in Megatron-LM's order, as it would for the same flags.

    `compiled` is asked when there is something to build.
    """

    cache: OrderCache
    seq_length: int
    vocab_size: int
    seed: int
    compiled: Callable[[], CompiledOrders | None]

    def dataset(
        self, source: IndexedDataset, first: int, last: int, requested: int | None, split: str
    ) -> MegatronDataset:
        """The sequences [first, last), for so many samples; None is one epoch."""
        sizes = OrderSizes(_total(source.lengths.part(first, last)), self.seq_length, requested)
        made_of = {
            "version": _VERSION,
            "indexes": _INDEXES,
            "file": contents_of(index_path(source.prefix)),
            "sequences": [first, last],
            "seq_length": self.seq_length,
            "epochs": sizes.epochs,
            "shuffled_first": sizes.shuffled_first,
            "seed": self.seed,
        }

        def build(files: ArrayFiles) -> None:
            _build_indexes(source.lengths[:], first, last, sizes, self.seed, self.compiled(), files)

        what = f"the {split} order of {source.prefix}, {sizes.samples:,} samples"
        indexes = self.cache.get(made_of, _INDEXES, build, what)
        return MegatronDataset(source, first, last, sizes, self.vocab_size, indexes)

    def blend(
        self, sources: Sequence[MegatronDataset], weights: Sequence[float], size: int | None, split: str
    ) -> BlendedDataset:
        """`size` samples of the sources by `weights`; None draws each source's samples once."""
        shares = normalized(np.array(weights, np.float64))
        made_of: dict[str, Any] = {"version": _VERSION, "indexes": BLEND_INDEXES, "size": size}
        if size is None:
            lengths = np.array([len(source) for source in sources])
            made_of |= {"lengths": lengths.tolist()}
            size = int(lengths.sum())

            def order() -> Iterable[tuple[np.ndarray, np.ndarray]]:
                return [exhaustive_order(lengths, self.compiled())]
        else:
            made_of |= {"weights": shares.tolist()}

            def order() -> Iterable[tuple[np.ndarray, np.ndarray]]:
                return blend_pieces(shares, size, self.compiled())

        what = f"the {split} blend of {len(sources)} data sets, {size:,} samples"
        arrays = self.cache.get(made_of, BLEND_INDEXES, partial(_build_blend, order, size), what)
        return BlendedDataset(tuple(sources), MegatronBlend(tuple(shares.tolist()), arrays))


def normalized(weights: np.ndarray) -> np.ndarray:
    """(K,) float64 divided by their sum, in numpy's order of summation, which decides the last bit."""
    return weights / np.sum(weights)


def _total(lengths: FileArray) -> int:
    return sum(int(chunk.sum(dtype=np.int64)) for chunk in lengths.chunks())


def _build_indexes(
    lengths: np.ndarray,
    first: int,
    last: int,
    sizes: OrderSizes,
    seed: int,
    compiled: CompiledOrders | None,
    files: ArrayFiles,
) -> None:
    random = np.random.RandomState(seed)
    documents = document_index(first, last, sizes, random, compiled)
    files.save("document_index", documents)
    rows = sizes.samples + 1
    with files.open("sample_index", sample_index_dtype(len(documents)), (rows, 2)) as write:
        for piece in sample_index(lengths, documents, sizes.seq_length, rows, compiled):
            write(piece)
    del documents
    files.save("shuffle_index", shuffle_index(sizes, random, compiled))


def _build_blend(
    order: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]], size: int, files: ArrayFiles
) -> None:
    """`order` gives the two indexes piece by piece."""
    pieces = iter(order())
    first = next(pieces)
    with ExitStack() as stack:
        writes = [
            stack.enter_context(files.open(name, part.dtype, (size,)))
            for name, part in zip(BLEND_INDEXES, first, strict=True)
        ]
        for piece in chain([first], pieces):
            for write, part in zip(writes, piece, strict=True):
                write(part)
