"""Which part of a data set belongs to train, valid and test."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_zpp.config.data import DEFAULT_SPLIT, SPLITS, DataConfig, split_shares
from megatron_zpp.config.options import option_error
from megatron_zpp.config.words import counted
from megatron_zpp.data.indexed import IndexedDataset

_ALTERNATIVE = {"train": "", "valid": ", or --eval-iters 0", "test": ""}  # to data of a split
_LARGER_SHARES = ("95,5,0", "90,10,0", "80,20,0", "50,50,0")  # without a test split, which no run needs


@dataclass(frozen=True)
class DatasetSlice:
    """The sequences [first, last) of a data set and its weight in the blend, None if none is given."""

    weight: float | None
    source: IndexedDataset
    first: int
    last: int

    def tokens(self) -> tuple[int, int]:
        """The tokens [first, last) of the sequences."""
        data = self.source
        first, last = (
            int(data.pointers[sequence]) // data.dtype.itemsize
            if sequence < data.num_sequences
            else data.num_tokens
            for sequence in (self.first, self.last)
        )
        return first, last

    def check_tokens(self, split: str, seq_length: int, needed: int, config: DataConfig) -> None:
        """Raise ValueError if the slice has fewer than the `needed` tokens of one sample."""
        first, last = self.tokens()
        if last - first < needed:
            if self.first == self.last and config.data_path:
                raise self._empty(split, config)
            fix = "a larger share in --split, " if config.data_path else ""
            has = f"{last - first} ({self.last - self.first} of {self.source.num_sequences} sequences)"
            what = (
                f"one sample needs {needed} tokens, but the {split} split of {self.source.prefix} has {has}"
            )
            raise option_error(
                "--seq-length", seq_length, f"{what}; give more data, {fix}or a shorter length"
            )

    def _empty(self, split: str, config: DataConfig) -> ValueError:
        count, whole = self.source.num_sequences, self.source.num_sequences == self.source.num_documents
        fix = f"more {'documents' if whole else 'sequences'}"
        for text in _LARGER_SHARES:
            ranges = cut(split_shares(text), count)
            if all(first < last for first, last in ranges[:2]):
                fix = f"--split {text}, or {fix}"
                break
        there = counted(count, "document" if whole else "sequence")
        what = f"the {split} split of {self.source.prefix} has 0 of its {there}"
        return option_error("--split", shown_split(config), f"{what}; give {fix}")


def cut(shares: Sequence[float], sequences: int) -> tuple[tuple[int, int], ...]:
    """Return the sequences [first, last) of each share, contiguous from 0.

    As in Megatron-LM, each end is the running sum of the shares times `sequences`, rounded to the nearest
    integer, halves to even. `shares` sum to 1, so the last end is `sequences`.
    """
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(round(total * sequences))
    assert ends[-1] == sequences, f"shares {shares} sum to {total}, not 1"
    return tuple(pairwise(ends))


def shown_split(config: DataConfig) -> str:
    """Return the value of --split for an error."""
    return config.split or f"{DEFAULT_SPLIT} (the default)"


def range_of_split(config: DataConfig, split: str, count: int) -> tuple[int, int]:
    """Return the range [first, last) of a split among `count` sequences, or blocks of text."""
    if not config.data_path:
        return 0, count
    return cut(config.shares, count)[SPLITS.index(split)]


def paths_of_split(config: DataConfig, split: str) -> tuple[str, tuple[str, ...]]:
    """Return the flag that names the data of a split, and its value. Raises ValueError if there is none."""
    flag = "--data-path" if config.data_path else f"--{split}-data-path"
    entries = config.data_path or getattr(config, f"{split}_data_path")
    fix = f"this run needs {split} data{_ALTERNATIVE[split]}"
    if not entries:
        raise option_error(flag, "(not given)", fix)
    if config.data_path and not config.shares[SPLITS.index(split)]:
        raise option_error("--split", config.split, fix)
    return flag, entries
