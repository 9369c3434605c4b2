"""Samples of data sets in Megatron-LM's order and blend; the indexes are cached on disk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.config.options import option_error
from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.indexed import IndexedDataset, index_path
from megatron_zpp.data.megatron.blend import BLEND_INDEXES, MegatronBlend, blend_order, exhaustive_order
from megatron_zpp.data.megatron.order import OrderSizes, document_index, sample_index, shuffle_index
from megatron_zpp.data.order_cache import CachedArrays, NamedArrays, OrderCache, contents_of
from megatron_zpp.data.samples import Epochs, KnownSamples
from megatron_zpp.data.split import DatasetSlice

_INDEXES = ("document_index", "sample_index", "shuffle_index")
_VERSION = 2  # of the cached indexes
_SURPLUS = 0.005  # samples of each data set beyond its share of a blend, relative


@dataclass(frozen=True)
class MegatronDataset(KnownSamples):
    """A finite number of samples, given by `sizes`, of some sequences of a data set.

    `indexes` has document_index (D,), sample_index (samples + 1, 2) and shuffle_index (samples,): see
    order.py.
    """

    source: IndexedDataset
    sizes: OrderSizes
    vocab_size: int
    indexes: CachedArrays

    def __len__(self) -> int:
        return self.sizes.samples

    @property
    def windows_per_epoch(self) -> int:
        return (self.sizes.tokens - 1) // self.sizes.seq_length

    def describe(self) -> str:
        return (
            f"{self.source.prefix}: {self.sizes.tokens:,} tokens, {len(self):,} samples of "
            f"{self.sizes.seq_length} in Megatron-LM's order"
        )

    def epochs(self, samples: int) -> list[Epochs]:
        return [Epochs(self.source.name, samples * self.sizes.seq_length / self.sizes.tokens)]

    def batch(self, indices: np.ndarray) -> np.ndarray:
        cuts = self.indexes["shuffle_index"][indices].astype(np.int64)
        tokens = self.source.read(*self._pieces(cuts), self.vocab_size)
        return tokens.reshape(len(cuts), self.sizes.seq_length + 1)

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


@dataclass(frozen=True, kw_only=True)
class MegatronOrders:
    """Builds a split's samples in the order that Megatron-LM would use for the same flags."""

    cache: OrderCache  # of their indexes
    flag: str  # that names the data sets
    split: str
    seq_length: int
    vocab_size: int
    seed: int

    def samples(
        self, parts: Sequence[DatasetSlice], requested: int | None
    ) -> MegatronDataset | BlendedDataset:
        """Return `requested` samples of `parts`; None requests every sample of one epoch.

        A single data set, and each data set of a blend with weights, is repeated as often as needed. A blend
        without weights has one epoch of each. Raises ValueError if that is fewer samples than requested, and
        for weights without a number of samples.
        """
        weighted = parts[0].weight is not None
        if len(parts) == 1 and not (weighted and self.flag == "--data-path"):
            return self._dataset(parts[0], requested)
        size = requested
        if weighted:
            if requested is None:
                fix = "Megatron-LM's blend with weights never ends; use --eval-iters"
                raise option_error("--full-validation", "(given)", f"{self.flag} has weights, and {fix}")
            weights = normalized(np.array([part.weight for part in parts], np.float64)).tolist()
            shares = [math.ceil(requested * weight) for weight in weights]
            sources = [
                self._dataset(part, math.ceil(share * (1 + _SURPLUS)))
                for part, share in zip(parts, shares, strict=True)
            ]
            size = sum(shares)
        else:
            sources = [self._dataset(part, None) for part in parts]
            weights = [len(source) for source in sources]
            available = sum(weights)
            if size is not None and size > available:
                fix = (
                    f"the run requests {size} {self.split} samples, but one epoch of each has {available}; "
                    "Megatron-LM repeats data sets only if they have weights: put a weight before each prefix"
                )
                raise self._refused(parts, fix)
        blend = self._blend(sources, weights, size)
        drawn = blend.blend.counts(size or sum(map(len, sources))).tolist()
        for source, count in zip(sources, drawn, strict=True):
            if count > len(source):  # in a blend of many data sets with few samples each, despite _SURPLUS
                fix = (
                    f"the blend draws {count} samples of {source.source.name}, but Megatron-LM's order has "
                    f"{len(source)}, where Megatron-LM fails as well; use --dataset-order windows"
                )
                raise self._refused(parts, fix)
        return blend

    def _dataset(self, part: DatasetSlice, requested: int | None) -> MegatronDataset:
        """Return `requested` samples of a data set; None requests one epoch."""
        source, first, last = part.source, part.first, part.last
        begin, end = part.tokens()
        sizes = OrderSizes(end - begin, self.seq_length, requested)
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

        def build() -> NamedArrays:
            random = np.random.RandomState(self.seed)
            documents = document_index(first, last, sizes, random)
            yield "document_index", documents
            yield "sample_index", sample_index(source.lengths[:], documents, self.seq_length)
            yield "shuffle_index", shuffle_index(sizes, random)

        what = f"the {self.split} order of {source.prefix}, {sizes.samples:,} samples"
        indexes = self.cache.get(made_of, build, what)
        return MegatronDataset(source, sizes, self.vocab_size, indexes)

    def _blend(
        self, sources: Sequence[MegatronDataset], weights: Sequence[float], size: int | None
    ) -> BlendedDataset:
        """Return `size` samples of the sources by `weights`; None draws every sample of each source once."""
        shares = normalized(np.array(weights, np.float64))
        lengths = np.array([len(source) for source in sources])
        drawn = {"lengths": lengths.tolist()} if size is None else {"weights": shares.tolist()}
        made_of = {"version": _VERSION, "indexes": BLEND_INDEXES, "size": size, **drawn}

        def build() -> NamedArrays:
            order = exhaustive_order(lengths) if size is None else blend_order(shares, size)
            return zip(BLEND_INDEXES, order, strict=True)

        samples = lengths.sum() if size is None else size
        what = f"the {self.split} blend of {len(sources)} data sets, {samples:,} samples"
        arrays = self.cache.get(made_of, build, what)
        return BlendedDataset(tuple(sources), MegatronBlend(tuple(shares.tolist()), arrays))

    def _refused(self, parts: Sequence[DatasetSlice], fix: str) -> ValueError:
        return option_error(self.flag, [part.source.prefix for part in parts], fix)


def normalized(weights: np.ndarray) -> np.ndarray:
    """Return (K,) float64 divided by its sum; numpy's order of summation determines the last bit."""
    return weights / np.sum(weights)
