"""Best-fit packing: samples of whole documents, and the data set that reads them.

A document of L tokens has L - 1 predictions: each token but the last is the input for the next one. It is cut
into pieces of at most S predictions, all of S but its last one; a piece of m predictions reads m + 1 tokens,
so that cuts lose none. Pieces are packed into samples of S by best-fit decreasing ("Fewer Truncations Improve
Language Modeling", arXiv 2404.10830): longest first, each into the fullest sample that has room for it. The
packing follows from the lengths alone, is computed once and cached. Epoch e visits the samples in a random
order, which is a closed form of (seed, e), as that of windows.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_zpp.config.options import option_error
from megatron_zpp.config.words import counted
from megatron_zpp.data.documents import NOT_COUNTED
from megatron_zpp.data.indexed import index_path
from megatron_zpp.data.order_cache import CachedArrays, NamedArrays, OrderCache, contents_of
from megatron_zpp.data.split import DatasetSlice
from megatron_zpp.data.stateless_random import permute, random_bits
from megatron_zpp.data.windows import RandomOrder

_INDEXES = ("starts", "lengths", "samples", "counts")
_VERSION = 1  # of the cached indexes
_ORDER = 1  # a use of an epoch's random bits, as in windows.py


@dataclass(frozen=True)
class PackedDataset(RandomOrder):
    """Samples of packed documents of an indexed data set.

    `indexes` has, in the order of the samples, the first token and the predictions of each piece, starts (P,)
    int64 and lengths (P,) int32; the first piece of each sample, then P, samples (W + 1,) int64; and the
    numbers of documents, of documents that are cut and of predictions, counts (3,) int64.
    """

    indexes: CachedArrays
    seq_length: int
    vocab_size: int
    filler: int  # the token of padding

    @property
    def windows_per_epoch(self) -> int:
        """W, the samples after which every prediction has been made once."""
        return len(self.indexes["samples"]) - 1

    def describe(self) -> str:
        documents, cut, predictions = self.indexes["counts"][:].tolist()
        padding = 1 - predictions / (self.windows_per_epoch * self.seq_length)
        return (
            f"{self.source.name}: {predictions:,} predictions of {counted(documents, 'document')}, {cut:,} "
            f"of them cut, packed into {self.windows_per_epoch:,} samples of {self.seq_length} with "
            f"{padding:.2%} padding"
        )

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Samples by number: (len,) integers of 0 or more to (len, 3, S) int64.

        The rows of a sample are inputs, targets, and ones where a document or the padding at the end begins.
        Targets are NOT_COUNTED for padding.
        """
        count, width = len(indices), self.seq_length
        rows, starts, lengths = self._pieces(indices)
        begins = np.cumsum(lengths) - lengths  # of each piece among all predictions
        # A piece has one more token than predictions.
        tokens = self.source.read(starts, lengths + 1, self.vocab_size)
        filled = np.bincount(rows, weights=lengths, minlength=count).astype(np.int64)
        place = np.arange(lengths.sum()) + np.repeat(_before(width - filled)[rows], lengths)
        batch = np.empty((3, count * width), np.int64)
        batch[0], batch[1], batch[2] = self.filler, NOT_COUNTED, 0
        last = np.cumsum(lengths + 1) - 1
        batch[0, place] = np.delete(tokens, last)
        batch[1, place] = np.delete(tokens, last - lengths)
        batch[2, place[begins]] = 1
        batch[2, (np.arange(count) * width + filled)[filled < width]] = 1
        return batch.reshape(3, count, width).swapaxes(0, 1)

    def _pieces(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return of each piece its row of the batch, its first token and its predictions: (P,) int64."""
        epochs, positions = np.divmod(np.asarray(indices, np.int64), self.windows_per_epoch)
        samples = permute(positions, self.windows_per_epoch, random_bits(self.seed, epochs, _ORDER))
        edges = self.indexes["samples"].gather(samples, np.full(len(samples), 2)).reshape(-1, 2)
        firsts, counts = edges[:, 0], edges[:, 1] - edges[:, 0]
        rows = np.repeat(np.arange(len(samples)), counts)
        starts, lengths = (self.indexes[name].gather(firsts, counts) for name in ("starts", "lengths"))
        return rows, starts, lengths.astype(np.int64)


def pack(
    part: DatasetSlice,
    cache: OrderCache,
    split: str,
    seq_length: int,
    vocab_size: int,
    *,
    seed: int,
    filler: int,
) -> PackedDataset:
    """Return the samples of `part`, indexed in `cache`. Raises ValueError if no document has two tokens."""
    source = part.source
    made_of = {
        "version": _VERSION,
        "indexes": _INDEXES,
        "file": contents_of(index_path(source.local)),
        "sequences": [part.first, part.last],
        "seq_length": seq_length,
    }
    what = f"the {split} packing of {source.prefix}"
    indexes = cache.get(made_of, lambda: _built_indexes(part, seq_length), what)
    packed = PackedDataset(source, indexes, seq_length, vocab_size, filler, seed=seed)
    if not packed.windows_per_epoch:
        fix = f"the {split} split of {source.prefix} has no document of two tokens; give more data"
        raise option_error("--dataset-packing", "best-fit", fix)
    return packed


def cut_documents(bounds: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first token and predictions of each piece: bounds (D + 1,) int64 to two (P,) int64.

    Document d has the tokens [bounds[d], bounds[d + 1]). The pieces are in the order of the tokens.
    """
    predictions = np.maximum(np.diff(bounds) - 1, 0)
    counts = -(-predictions // seq_length)
    within = (np.arange(counts.sum()) - np.repeat(_before(counts), counts)) * seq_length
    lengths = np.minimum(np.repeat(predictions, counts) - within, seq_length)
    return np.repeat(bounds[:-1], counts) + within, lengths


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the bin of each item, by best-fit decreasing: (P,) integers in [1, size] to (P,) int64.

    Bins hold `size` and are numbered from 0 in the order in which they are opened. Items of one length are
    placed together: the fullest bin with room for one takes as many as it has room for, then the next one.
    Whenever a set of equally full bins is used up, their room has at least halved, so that there are
    O(size · log(size)) such sets, and the rest is sorting.
    """
    descending = np.argsort((size - lengths).astype(np.uint16 if size < 1 << 16 else np.int64), kind="stable")
    each, firsts = np.unique(size - lengths[descending], return_index=True)
    found = np.empty(len(lengths), np.int64)
    room = _Room(size)
    for length, first, last in zip((size - each).tolist(), firsts, [*firsts[1:], len(lengths)], strict=False):
        items, placed = descending[first:last], 0
        for left, bins in room.taken(length, len(items)):
            fit = left // length
            used = np.repeat(bins, fit)[: len(items) - placed]
            found[items[placed : placed + len(used)]] = used
            placed += len(used)
            room.give(left - fit * length, bins[: len(used) // fit])
            if partly := len(used) % fit:
                room.give(left - partly * length, bins[-1:])
    return found


class _Room:
    """Bins of one size by the room that they have left."""

    def __init__(self, size: int) -> None:
        self._size, self._opened = size, 0
        self._sizes: list[int] = []  # ascending
        self._bins: dict[int, list[np.ndarray]] = {}

    def give(self, left: int, bins: np.ndarray) -> None:
        """Add bins with room for `left`."""
        if not (left and len(bins)):
            return
        if left not in self._bins:
            bisect.insort(self._sizes, left)
            self._bins[left] = []
        self._bins[left].append(bins)

    def taken(self, length: int, items: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (room, bins) for `items` items of a length, the fullest first, and at last new ones.

        What is yielded is removed. Bins that are given back meanwhile must have less room than `length`, but
        for those after the last yield.
        """
        while items > 0:
            at = bisect.bisect_left(self._sizes, length)
            if at == len(self._sizes):
                opened = self._opened + np.arange(-(-items // (self._size // length)))
                self._opened += len(opened)
                yield self._size, opened
                return
            left = self._sizes[at]
            bins = self._bins[left].pop()
            used = bins[: -(-items // (left // length))]
            if len(used) < len(bins):
                self._bins[left].append(bins[len(used) :])
            elif not self._bins[left]:
                del self._bins[left], self._sizes[at]
            items -= len(used) * (left // length)
            yield left, used


def _built_indexes(part: DatasetSlice, seq_length: int) -> NamedArrays:
    bounds = _document_bounds(part)
    starts, lengths = cut_documents(bounds, seq_length)
    bins = best_fit(lengths, seq_length)
    order = np.argsort(bins, kind="stable")
    yield "starts", starts[order]
    yield "lengths", lengths[order].astype(np.int32)
    counts = np.bincount(bins)
    yield "samples", np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    documents = np.diff(bounds)
    totals = [(documents > 0).sum(), (documents - 1 > seq_length).sum(), lengths.sum()]
    yield "counts", np.array(totals, np.int64)


def _document_bounds(part: DatasetSlice) -> np.ndarray:
    """Return the first token of each document of a slice, then its end: (D + 1,) int64."""
    data, (first, last) = part.source, part.tokens()
    sequences = data.document_indices[:]
    inside = sequences[(sequences > part.first) & (sequences < part.last)]
    starts = data.pointers[:][inside] // data.dtype.itemsize
    return np.concatenate([[first], starts, [last]])


def _before(sizes: np.ndarray) -> np.ndarray:
    """Return the sum of all sizes before each: (N,) to (N,) int64."""
    return np.cumsum(sizes) - sizes
