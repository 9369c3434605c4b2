"""Opens the data of a run and checks it, so that errors appear before the first step."""

import difflib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.data import SPLITS, DataConfig, weighted_prefixes
from megatron_zpp.config.options import option_error
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.config.values.text import HUB, JSON_LINES, is_hub, is_text, looks_like_hub, plain_suffix
from megatron_zpp.config.words import counted
from megatron_zpp.data.blend import Blend, BlendedDataset, BlendOrder, Concatenation
from megatron_zpp.data.checksums import checksums_path
from megatron_zpp.data.documents import check_ends, masked_samples
from megatron_zpp.data.indexed import IndexedDataset, NoDataset
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.data.provenance import check_provenance
from megatron_zpp.data.samples import KnownSamples, Samples, Source
from megatron_zpp.data.split import DatasetSlice, paths_of_split, range_of_split, shown_split
from megatron_zpp.data.stateless_random import random_bits
from megatron_zpp.data.windows import WindowDataset, order_seed
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.object_errors import ObjectError

if TYPE_CHECKING:
    from megatron_zpp.data.order_cache import OrderCache
    from megatron_zpp.data.text.cache import TokenCache

_PROBED = 8  # samples read at open: they almost always reveal ids of another vocabulary


@dataclass(frozen=True)
class Splits:
    """The samples of each split, None if the run does not need it, and the files and texts that they read."""

    train: Samples  # which every run needs
    valid: Samples | None
    test: Samples | None
    files: tuple[IndexedDataset, ...]
    texts: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True)
class SplitOpener:
    """Opens and checks the splits of a run; needs no device or process group.

    Samples are numbered from 0. Every split and every data set has a different order, determined by `seed`.
    With document masks, batches are ModelInputs.

    vocab_size              ids of the tokenizer without padding; all tokens must be below
    tokenizer               tokenises text; may be None for other data
    tokenizer_description   compared with the record of the data, None to skip that; masks need its `eod`
    requested               samples of each split that the run may read, None for one epoch; the length of
                            Megatron-LM's order
    evaluated               samples that an evaluation reads; text is tokenised for them. None is one epoch,
                            of one data set after another, which weights contradict
    keeps_orders            whether an order that is built stays on disk
    say                     gets a line when an order is built
    """

    config: DataConfig
    seq_length: int
    vocab_size: int
    seed: int
    tokenizer: TokenizerConfig | None = None
    tokenizer_description: Mapping[str, Any] | None
    requested: Mapping[str, int | None] = field(default_factory=dict)
    evaluated: int | None = None
    keeps_orders: bool = True
    say: Callable[[str], None] = lambda line: None
    data: dict[str, IndexedDataset] = field(default_factory=dict, init=False)  # opened once for all splits
    texts: dict[str, "TokenCache"] = field(default_factory=dict, init=False)

    def open(self, needed: Collection[str]) -> Splits:
        """Open the splits in `needed`, of train, valid, test.

        Raises ValueError, one line, if a file is missing or damaged, was made with another tokenizer, holds a
        token outside the vocabulary, has too few tokens for one sample of a needed split, or lacks checksums
        for --verify-data.
        """
        for split in () if self.config.mock_data else needed:  # before an order is built, or text tokenised
            paths_of_split(self.config, split)
        samples: dict[str, Any] = {
            split: masked_samples(self.split(split), self.config, self.eod) if split in needed else None
            for split in SPLITS
        }
        texts = tuple(cache.source for cache in self.texts.values())
        return Splits(**samples, files=tuple(self.data.values()), texts=texts)

    @property
    def eod(self) -> int:
        """End of document, for document masks."""
        if not self.config.masks:
            return -1
        assert self.tokenizer_description is not None, "document masks need the tokenizer's eod"
        return int(self.tokenizer_description["eod"])

    def split(self, split: str) -> Samples:
        split_seed = seed_of(split, self.seed)
        if self.config.mock_data:
            return MockDataset(self.seq_length, self.vocab_size, split_seed)
        flag, entries = paths_of_split(self.config, split)
        weighted = weighted_prefixes(flag, entries)
        if self.config.dataset_order == "megatron":
            return self._megatron(split, flag, [self._part(split, flag, *each) for each in weighted])
        whole = split != "train" and self.evaluated is None
        if whole:
            _check_unweighted(flag, weighted)
        weights = [self._size(split, flag, path) if weight is None else weight for weight, path in weighted]
        sources: list[KnownSamples] = []
        for number, (_, path) in enumerate(weighted):
            seed = order_seed(split_seed, number)
            if is_text(path):
                sources.append(self._text_samples(split, flag, path, seed, weights[number], weights))
            else:
                read = self._packed if self.config.packs else self._windows
                samples = read(split, self._part(split, flag, None, path), seed)
                samples.batch(np.arange(min(_PROBED, samples.windows_per_epoch or _PROBED)))
                sources.append(samples)
        if len(sources) == 1:
            return sources[0]
        order: BlendOrder = Blend(tuple(weights))
        if whole:  # each source is prepared as a whole
            order = Concatenation(tuple(source.windows_per_epoch or 0 for source in sources))
        return BlendedDataset(tuple(sources), order)

    def _size(self, split: str, flag: str, path: str) -> float:
        """Return the weight of a data set without one: bytes of text, or tokens of the split."""
        if is_text(path):
            return float(self._text(flag, path).source.size)
        first, last = self._part(split, flag, None, path).tokens()
        return float(last - first)

    def _windows(self, split: str, part: DatasetSlice, seed: int) -> KnownSamples:
        part.check_tokens(split, self.seq_length, self.seq_length + 1, self.config)
        return WindowDataset(part.source, *part.tokens(), self.seq_length, self.vocab_size, seed=seed)

    def _packed(self, split: str, part: DatasetSlice, seed: int) -> KnownSamples:
        from megatron_zpp.data.packing import pack

        part.check_tokens(split, self.seq_length, 2, self.config)
        return pack(
            part, self._orders(part), split, self.seq_length, self.vocab_size, seed=seed, filler=self.eod
        )

    def _text_samples(
        self, split: str, flag: str, path: str, seed: int, weight: float, weights: Sequence[float]
    ) -> KnownSamples:
        """Open a text and tokenise its first samples: an evaluation's, or enough to find most errors."""
        if self.config.masks and not self.config.append_eod:
            mask = "--" + self.config.masks[0].replace("_", "-")
            fix = f"the documents of the text {path} have no end of document; add --append-eod"
            raise option_error(mask, "(given)", fix)
        if flag in ("--valid-data-path", "--test-data-path") and is_hub(path) and path.count(":") < 3:
            fix = f"would read the train split; name a split, as {HUB}NAME:CONFIG:SPLIT or {HUB}NAME::SPLIT"
            raise option_error(flag, path, fix)
        from megatron_zpp.data.text.samples import TextDataset

        cache = self._text(flag, path)
        text = cache.source
        blocks = range_of_split(self.config, split, text.blocks)
        if blocks[0] == blocks[1]:
            what = f"leaves no {split} part of {path}, which is cut into {counted(text.blocks, 'block')}"
            fix = "give it a larger share"
            if text.blocks == 1:
                fix = "give more text, or text of its own to each split: --train-data-path, --valid-data-path"
            raise option_error("--split", shown_split(self.config), f"{what}; {fix}")
        prepared = 1 if split == "train" else self.evaluated
        if prepared is not None:
            # A blend deviates from the shares by up to half a sample per level of its tree.
            prepared = math.ceil(prepared * weight / sum(weights)) + len(weights)
        return TextDataset(split, cache, blocks, self.seq_length, seed, prepared)

    def _megatron(self, split: str, flag: str, parts: list[DatasetSlice]) -> Samples:
        from megatron_zpp.data.megatron.dataset import MegatronOrders

        requested = self.requested[split]
        repeats = requested is not None and (len(parts) == 1 or parts[0].weight is not None)
        for part in parts:
            part.check_tokens(split, self.seq_length, 2 if repeats else self.seq_length + 1, self.config)
        orders = MegatronOrders(
            cache=self._orders(parts[0]),
            flag=flag,
            split=split,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            seed=self.seed,
        )
        samples = orders.samples(parts, requested)
        available = requested or samples.windows_per_epoch
        samples.batch(np.arange(_PROBED if available is None else min(_PROBED, available)))
        return samples

    def _orders(self, part: DatasetSlice) -> "OrderCache":
        from megatron_zpp.data.order_cache import OrderCache

        return OrderCache(self.config, part.source.local, self.say, keeps=self.keeps_orders)

    def _part(self, split: str, flag: str, weight: float | None, prefix: str) -> DatasetSlice:
        data = self._data(flag, prefix)
        return DatasetSlice(weight, data, *range_of_split(self.config, split, data.num_sequences))

    def _data(self, flag: str, prefix: str) -> IndexedDataset:
        if prefix not in self.data:
            self.data[prefix] = _open(flag, prefix, self.config, self.tokenizer_description)
            if not self.config.packs:
                check_ends(self.data[prefix], self.config.masks, self.eod)
            if self.config.verify_data and self.data[prefix].checksums is None:
                missing = checksums_path(self.data[prefix].prefix)
                fix = f"{missing} is missing; preprocess the data again, or omit the flag"
                raise option_error("--verify-data", "(given)", fix)
        return self.data[prefix]

    def _text(self, flag: str, path: str) -> "TokenCache":
        if path not in self.texts:
            from megatron_zpp.data.text.open import open_text

            assert self.tokenizer is not None, "text needs a tokenizer"
            assert self.tokenizer_description is not None, "text needs a tokenizer"
            self.texts[path] = open_text(
                flag,
                path,
                data=self.config,
                tokenizer=self.tokenizer,
                description=self.tokenizer_description,
                say=self.say,
            )
        return self.texts[path]


def _check_unweighted(flag: str, weighted: Sequence[tuple[float | None, str]]) -> None:
    """Raise ValueError for a blend with weights, of which there is no epoch."""
    if len(weighted) > 1 and weighted[0][0] is not None:
        fix = "or name the validation data without weights"
        if flag == "--data-path":
            fix = "or --train-data-path and, without weights, --valid-data-path"
        fix = f"{flag} has weights, and a blend with weights never ends; use --eval-iters, {fix}"
        raise option_error("--full-validation", "(given)", fix)


def seed_of(split: str, seed: int) -> int:
    """Return the seed of a split, from which the orders of its data sets follow."""
    return int(random_bits(seed, SPLITS.index(split))[0])


def _open(
    flag: str, prefix: str, config: DataConfig, tokenizer_description: Mapping[str, Any] | None
) -> IndexedDataset:
    if os.path.isfile(prefix) and not prefix.endswith((".bin", ".idx")):
        endings = " or ".join(JSON_LINES)
        fix = f"is not a tokenised data set; text must be JSON lines, named {endings}, then .gz or .zst"
        raise option_error(flag, prefix, f"{fix}; data/build_corpus.py converts other text")
    try:
        data = IndexedDataset(prefix, config.object_storage_cache_path)
    except DamagedFile as damage:
        raise option_error(flag, prefix, str(damage)) from None
    except NoDataset:
        index = prefix.removesuffix(".idx").removesuffix(".bin") + ".idx"
        raise option_error(flag, prefix, f"{index} does not exist; {_nearest(prefix)}") from None
    except ValueError as error:
        raise option_error(flag, prefix, f"{error}; name another data set, or preprocess it again") from None
    except ObjectError as error:
        raise option_error(flag, prefix, str(error.strerror)) from None
    except OSError as error:
        raise option_error(flag, prefix, f"{one_line(error)}; name a data set that can be read") from None
    if tokenizer_description is not None:
        check_provenance(data.local, tokenizer_description)
    return data


def _nearest(prefix: str) -> str:
    """Return what to give in place of a prefix without files: data of a similar name beside it, if any."""
    remedy = f"give the prefix of a .bin/.idx pair, a {JSON_LINES[0]} file, 'DIR/*.parquet' or {HUB}"
    directory, name = os.path.split(prefix)
    try:
        files = sorted(os.listdir(directory or "."))
    except OSError:
        return remedy + (prefix if looks_like_hub(prefix) else "NAME")
    remedy += "NAME"
    data = [file for file in files if file.endswith(".idx") or plain_suffix(file) == JSON_LINES[0]]
    there = [file.removesuffix(".idx") for file in data]
    close = [each for each in there if name and each.startswith(name)]
    close += difflib.get_close_matches(name, there, n=1)
    return f"did you mean {os.path.join(directory, close[0])}? Or {remedy}" if close else remedy
