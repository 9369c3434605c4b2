"""Opens what a run reads, and refuses what it could not read to the end."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.data import SPLITS, DataConfig, weighted_prefixes
from megatron_zpp.config.options import refusal
from megatron_zpp.data.blend import Blend, BlendedDataset
from megatron_zpp.data.checksums import checksums_path
from megatron_zpp.data.hashing import random_bits
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.data.provenance import check_provenance
from megatron_zpp.data.samples import Samples
from megatron_zpp.data.split import cut
from megatron_zpp.data.windows import WindowDataset
from megatron_zpp.storage.checksums import DamagedFile

_PROBED = 8  # samples read at open: a foreign vocabulary nearly always shows in them


@dataclass(frozen=True)
class Splits:
    """The sources of samples of a run, None where the run needs none; and the files that they read."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None
    files: tuple[IndexedDataset, ...]


def open_splits(
    config: DataConfig,
    *,
    seq_length: int,
    vocab_size: int,
    seed: int,
    tokenizer_description: Mapping[str, Any] | None,
    needed: Collection[str] = ("train", "valid"),
) -> Splits:
    """Opens and checks the splits in `needed` (of train, valid, test), before a device or group is taken.

    Token ids are below `vocab_size`, the tokenizer's without padding. `tokenizer_description` is compared
    with what the data records; None compares nothing. Each split and data set has its own order, decided by
    `seed`; samples are numbered from 0.

    Raises ValueError, one line, when a file is missing or damaged, was made with another tokenizer, holds a
    token outside the vocabulary, has too few tokens in a needed split for one sample, or has no checksums for
    --verify-data.
    """
    assert set(needed) <= set(SPLITS), f"splits are {SPLITS}, not {needed}"
    opened: dict[str, IndexedDataset] = {}  # a file that all splits share is read and checked once

    def open_data(flag: str, prefix: str) -> IndexedDataset:
        if prefix not in opened:
            opened[prefix] = _open(flag, prefix, tokenizer_description)
            if config.verify_data and opened[prefix].checksums is None:
                missing = checksums_path(opened[prefix].prefix)
                fix = f"{missing} is missing; preprocess the data again, or leave the flag out"
                raise refusal("--verify-data", "(given)", fix)
        return opened[prefix]

    def open_split(split: str) -> Samples:
        split_seed = int(random_bits(seed, SPLITS.index(split))[0])
        if config.mock_data:
            return MockDataset(seq_length, vocab_size, split_seed)
        flag = "--data-path" if config.data_path else f"--{split}-data-path"
        entries = config.data_path or getattr(config, f"{split}_data_path")
        if not entries:
            raise refusal(flag, "(not given)", f"this run needs {split} data{_WITHOUT[split]}")
        weights, sources = [], []
        for number, (weight, prefix) in enumerate(weighted_prefixes(flag, entries)):
            data = open_data(flag, prefix)
            first, last = _token_range(config, split, data, seq_length)
            own_seed = int(random_bits(split_seed, number)[0])
            source = WindowDataset(data, first, last, seq_length, vocab_size, own_seed)
            source.batch(np.arange(min(_PROBED, source.windows_per_epoch)))
            sources.append(source)
            weights.append(float(last - first) if weight is None else weight)
        return sources[0] if len(sources) == 1 else BlendedDataset(tuple(sources), Blend(tuple(weights)))

    samples = {split: open_split(split) if split in needed else None for split in SPLITS}
    return Splits(**samples, files=tuple(opened.values()))


_WITHOUT = {"train": "", "valid": ", or --eval-iters 0", "test": ""}


def _open(flag: str, prefix: str, tokenizer_description: Mapping[str, Any] | None) -> IndexedDataset:
    """Whatever is wrong with the data set is said with its flag, and with what to do about it."""
    try:
        data = IndexedDataset(prefix)
    except DamagedFile as damage:
        raise refusal(flag, prefix, str(damage)) from None
    except ValueError as error:
        raise refusal(flag, prefix, f"{error}; name another data set, or preprocess it again") from None
    except OSError as error:
        raise refusal(flag, prefix, f"{one_line(error)}; name a data set that can be read") from None
    if tokenizer_description is not None:
        check_provenance(data.prefix, tokenizer_description)
    return data


def _token_range(config: DataConfig, split: str, data: IndexedDataset, seq_length: int) -> tuple[int, int]:
    """The tokens [first, last) of a split. Raises ValueError when they are too few for one sample."""
    first, last = 0, data.num_sequences
    if config.data_path:
        share = config.shares[SPLITS.index(split)]
        if not share:
            raise refusal("--split", config.split, f"this run needs {split} data{_WITHOUT[split]}")
        first, last = cut(config.shares, data.num_sequences)[SPLITS.index(split)]
    ends = [
        int(data.pointers[sequence]) // data.dtype.itemsize
        if sequence < data.num_sequences
        else data.num_tokens
        for sequence in (first, last)
    ]
    tokens = ends[1] - ends[0]
    if tokens <= seq_length:
        fix = "a larger share in --split, " if config.data_path else ""
        raise refusal(
            "--seq-length",
            seq_length,
            f"one sample needs {seq_length + 1} tokens, but the {split} split of {data.prefix} has {tokens} "
            f"({last - first} of {data.num_sequences} sequences); give more data, {fix}or a shorter length",
        )
    return ends[0], ends[1]
