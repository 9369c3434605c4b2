"""Opens what a run reads, and refuses what it could not read to the end."""

import functools
import glob
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.data import DEFAULT_SPLIT, SPLITS, DataConfig, weighted_prefixes
from megatron_zpp.config.options import option_error
from megatron_zpp.config.text import HUB, JSON_LINES, is_text, looks_like_hub
from megatron_zpp.data.blend import Blend, BlendedDataset
from megatron_zpp.data.checksums import checksums_path
from megatron_zpp.data.documents import check_ends, masked_samples
from megatron_zpp.data.hashing import random_bits
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.megatron.compiled_orders import CompiledOrders, compiled_orders
from megatron_zpp.data.megatron.dataset import MegatronOrders
from megatron_zpp.data.megatron.split import DatasetSlice, build_split
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.data.order_cache import OrderCache
from megatron_zpp.data.provenance import check_provenance
from megatron_zpp.data.samples import Samples
from megatron_zpp.data.split import cut
from megatron_zpp.data.windows import WindowDataset, order_seed
from megatron_zpp.storage.checksums import DamagedFile

_PROBED = 8  # samples read at open: a foreign vocabulary nearly always shows in them


@dataclass(frozen=True)
class Splits:
    """The sources of samples of a run, None where the run needs none; and the files that they read."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None
    files: tuple[IndexedDataset, ...]


class TextSlice(Protocol):
    """A text that is cut into blocks, of which a split reads some."""

    blocks: int
    size: int  # bytes, by which texts are mixed without weights

    def samples(
        self, split: str, blocks: tuple[int, int], seq_length: int, seed: int, prepared: int | None
    ) -> Samples:
        """Samples of the blocks [first, last), of which the first `prepared` are tokenised now; None is all.

        Raises ValueError when one of these cannot be read, or the split has no sample.
        """


def _no_text(flag: str, path: str) -> TextSlice:
    raise option_error(flag, path, "is text, which this program does not tokenise")


def open_splits(
    config: DataConfig,
    *,
    seq_length: int,
    vocab_size: int,
    seed: int,
    tokenizer_description: Mapping[str, Any] | None,
    needed: Collection[str] = ("train", "valid"),
    requested: Mapping[str, int | None] = MappingProxyType({}),
    say: Callable[[str], None] = lambda line: None,
    open_text: Callable[[str, str], TextSlice] = _no_text,
    evaluated: int | None = None,
) -> Splits:
    """Opens and checks the splits in `needed` (of train, valid, test), before a device or group is taken.

    With document masks their batches are ModelInputs; the tokenizer's `eod` must be described for them.

    `requested` is how many samples of each the run may read, None for one epoch: Megatron-LM's order depends
    on it, and is built for so many; `say` gets a line when that has to be done. `open_text` (flag, path)
    opens text; the `evaluated` samples that an evaluation reads, None for one epoch, are tokenised at once.

    Token ids are below `vocab_size`, the tokenizer's without padding. `tokenizer_description` is compared
    with what the data records; None compares nothing. Each split and data set has its own order, decided by
    `seed`; samples are numbered from 0.

    Raises ValueError, one line, when a file is missing or damaged, was made with another tokenizer, holds a
    token outside the vocabulary, has too few tokens in a needed split for one sample, or has no checksums for
    --verify-data.
    """
    assert set(needed) <= set(SPLITS), f"splits are {SPLITS}, not {needed}"
    opening = _Opening(
        config,
        seq_length,
        vocab_size,
        seed,
        tokenizer_description,
        requested,
        say,
        open_text,
        evaluated,
        functools.cache(lambda: compiled_orders(say)),  # for the first order that is to be built
        tokenizer_description["eod"] if config.masks else -1,
    )
    samples = {
        split: masked_samples(opening.split(split), config, opening.eod) if split in needed else None
        for split in SPLITS
    }
    return Splits(**samples, files=tuple(opening.data.values()))


@dataclass(frozen=True)
class _Opening:
    """What the splits of a run are told, and share while they are opened; see `open_splits`."""

    config: DataConfig
    seq_length: int
    vocab_size: int
    seed: int
    tokenizer_description: Mapping[str, Any] | None
    requested: Mapping[str, int | None]
    say: Callable[[str], None]
    open_text: Callable[[str, str], TextSlice]
    evaluated: int | None
    compiled: Callable[[], CompiledOrders | None]
    eod: int  # the end of a document, where documents are kept apart
    data: dict[str, IndexedDataset] = field(default_factory=dict)  # what all splits share is read once
    texts: dict[str, TextSlice] = field(default_factory=dict)

    def split(self, split: str) -> Samples:
        """Opens one of train, valid, test."""
        config, split_seed = self.config, seed_of(split, self.seed)
        if config.mock_data:
            return MockDataset(self.seq_length, self.vocab_size, split_seed)
        flag = "--data-path" if config.data_path else f"--{split}-data-path"
        entries = config.data_path or getattr(config, f"{split}_data_path")
        if not entries:
            raise option_error(flag, "(not given)", f"this run needs {split} data{_WITHOUT[split]}")
        weighted = weighted_prefixes(flag, entries)
        if config.dataset_order == "megatron":
            return self._megatron(split, flag, [self._part(split, flag, *each) for each in weighted])
        weights = [self._size(split, flag, path) if weight is None else weight for weight, path in weighted]
        sources: list[Samples] = []
        for number, (_, path) in enumerate(weighted):
            own_seed = order_seed(split_seed, number)
            if is_text(path):
                sources.append(self._text_samples(split, flag, path, own_seed, weights[number], weights))
            else:
                sources.append(self._windows(split, self._part(split, flag, None, path), own_seed))
        return sources[0] if len(sources) == 1 else BlendedDataset(tuple(sources), Blend(tuple(weights)))

    def _size(self, split: str, flag: str, path: str) -> float:
        """What it weighs beside its like: bytes of text, or the tokens of the split."""
        if is_text(path):
            return float(self._text(flag, path).size)
        first, last = _tokens(self._part(split, flag, None, path))
        return float(last - first)

    def _windows(self, split: str, part: DatasetSlice, seed: int) -> WindowDataset:
        _check_enough(self.config, split, part, self.seq_length, self.seq_length + 1)
        samples = WindowDataset(part.source, *_tokens(part), self.seq_length, self.vocab_size, seed)
        samples.batch(np.arange(min(_PROBED, samples.windows_per_epoch)))
        return samples

    def _text_samples(
        self, split: str, flag: str, path: str, seed: int, weight: float, weights: Sequence[float]
    ) -> Samples:
        """With the first of them tokenised: what an evaluation reads, or enough to see that training can."""
        if self.config.masks and not self.config.append_eod:
            mask = "--" + self.config.masks[0].replace("_", "-")
            fix = f"{path} is text, whose documents have an end where --append-eod says so; add it"
            raise option_error(mask, "(given)", fix)
        text = self._text(flag, path)
        blocks = _sequences(self.config, split, text.blocks)
        if blocks[0] == blocks[1]:
            fix = f"leaves no {split} part of {path}, which is cut into {text.blocks} blocks"
            raise option_error(
                "--split", self.config.split or DEFAULT_SPLIT, f"{fix}; give it a larger share"
            )
        prepared = 1 if split == "train" else self.evaluated
        if prepared is not None:  # a blend is within half a sample for each of its levels of the share
            prepared = math.ceil(prepared * weight / sum(weights)) + len(weights)
        return text.samples(split, blocks, self.seq_length, seed, prepared)

    def _megatron(self, split: str, flag: str, parts: list[DatasetSlice]) -> Samples:
        requested = self.requested[split]
        repeats = requested is not None and (len(parts) == 1 or parts[0].weight is not None)
        for part in parts:
            _check_enough(self.config, split, part, self.seq_length, 2 if repeats else self.seq_length + 1)
        cache = _cache(self.config, parts[0].source.prefix, self.say)
        orders = MegatronOrders(cache, self.seq_length, self.vocab_size, self.seed, self.compiled)
        samples = build_split(orders, flag, split, parts, requested)
        samples.batch(np.arange(min(_PROBED, requested or samples.windows_per_epoch)))
        return samples

    def _part(self, split: str, flag: str, weight: float | None, prefix: str) -> DatasetSlice:
        data = self._data(flag, prefix)
        return DatasetSlice(weight, data, *_sequences(self.config, split, data.num_sequences))

    def _data(self, flag: str, prefix: str) -> IndexedDataset:
        if prefix not in self.data:
            self.data[prefix] = _open(flag, prefix, self.tokenizer_description)
            check_ends(self.data[prefix], self.config.masks, self.eod)
            if self.config.verify_data and self.data[prefix].checksums is None:
                missing = checksums_path(self.data[prefix].prefix)
                fix = f"{missing} is missing; preprocess the data again, or leave the flag out"
                raise option_error("--verify-data", "(given)", fix)
        return self.data[prefix]

    def _text(self, flag: str, path: str) -> TextSlice:
        if path not in self.texts:
            self.texts[path] = self.open_text(flag, path)
        return self.texts[path]


def seed_of(split: str, seed: int) -> int:
    """What decides the orders of a split's data sets."""
    return int(random_bits(seed, SPLITS.index(split))[0])


_WITHOUT = {"train": "", "valid": ", or --eval-iters 0", "test": ""}


def _open(flag: str, prefix: str, tokenizer_description: Mapping[str, Any] | None) -> IndexedDataset:
    """Whatever is wrong with the data set is said with its flag, and with what to do about it."""
    if os.path.isfile(prefix) and not prefix.endswith((".bin", ".idx")):
        endings = " or ".join(JSON_LINES)
        fix = f"is no tokenised data set; text is JSON lines, and ends in {endings}, then .gz or .zst"
        raise option_error(flag, prefix, f"{fix}; data/build_corpus.py converts other text")
    try:
        data = IndexedDataset(prefix)
    except DamagedFile as damage:
        raise option_error(flag, prefix, str(damage)) from None
    except ValueError as error:
        fix = "name another data set, or preprocess it again"
        if looks_like_hub(prefix) and not glob.glob(f"{glob.escape(prefix)}.*"):
            fix += f"; one of Hugging Face's is {HUB}{prefix}"
        raise option_error(flag, prefix, f"{error}; {fix}") from None
    except OSError as error:
        raise option_error(flag, prefix, f"{one_line(error)}; name a data set that can be read") from None
    if tokenizer_description is not None:
        check_provenance(data.prefix, tokenizer_description)
    return data


def _cache(config: DataConfig, prefix: str, say: Callable[[str], None]) -> OrderCache:
    """--data-cache-path, or a place that all runs on the same data find."""
    shown = config.data_cache_path or f"{prefix}.orders"
    flag = "--data-cache-path" if config.data_cache_path else "--data-cache-path (not given)"
    return OrderCache(flag, shown, Path(shown), say)


def _sequences(config: DataConfig, split: str, count: int) -> tuple[int, int]:
    """The sequences, or blocks of text, [first, last) of a split, of `count`."""
    if not config.data_path:
        return 0, count
    if not config.shares[SPLITS.index(split)]:
        raise option_error("--split", config.split, f"this run needs {split} data{_WITHOUT[split]}")
    return cut(config.shares, count)[SPLITS.index(split)]


def _tokens(part: DatasetSlice) -> tuple[int, int]:
    """The tokens [first, last) of its sequences."""
    data = part.source
    first, last = (
        int(data.pointers[sequence]) // data.dtype.itemsize
        if sequence < data.num_sequences
        else data.num_tokens
        for sequence in (part.first, part.last)
    )
    return first, last


def _check_enough(config: DataConfig, split: str, part: DatasetSlice, seq_length: int, needed: int) -> None:
    """Raises ValueError when the tokens are too few for one sample."""
    first, last = _tokens(part)
    if last - first < needed:
        fix = "a larger share in --split, " if config.data_path else ""
        raise option_error(
            "--seq-length",
            seq_length,
            f"one sample needs {needed} tokens, but the {split} split of {part.source.prefix} has "
            f"{last - first} ({part.last - part.first} of {part.source.num_sequences} sequences); give more "
            f"data, {fix}or a shorter length",
        )
