"""Which tokens a run reads, and how they are split into train, valid and test."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, flag_name, option, option_error, optional, reader, switch
from megatron_zpp.config.values.text import is_hub, is_text
from megatron_zpp.config.values.urls import check_location, local_path

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")
MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """data: where the tokens come from"""

    data_path: tuple[str, ...] = option(
        (),
        "Prefix of PREFIX.bin and PREFIX.idx, divided by --split. Several prefixes are mixed in proportion "
        "to their tokens, or by weight: WEIGHT PREFIX WEIGHT PREFIX …. A PREFIX may also be text: "
        "FILE.jsonl[.gz, .zst], FILE.parquet, a quoted glob of such files, or "
        "hf:NAME[@REVISION][:CONFIG[:SPLIT]]. s3://BUCKET/PREFIX: in an object store.",
    )
    train_data_path: tuple[str, ...] = option((), "Like --data-path, for training only.")
    valid_data_path: tuple[str, ...] = option((), "Like --data-path, for validation only.")
    test_data_path: tuple[str, ...] = option((), "Like --data-path, for the test at the end only.")
    split: str | None = optional(
        "Shares of --data-path for train, valid and test, in this order, split between documents "
        f"[{DEFAULT_SPLIT}]",
        metavar="SHARES",
    )
    dataset_order: Literal["windows", "megatron"] = option(
        "windows",
        "windows: shuffled windows of the data; needs no index. megatron: Megatron-LM's samples, in its "
        "order; builds an index before the first step.",
    )
    dataset_packing: Literal["concatenation", "best-fit"] = option(
        "concatenation",
        "What samples consist of. concatenation: the tokens of all documents, cut every --seq-length. "
        "best-fit: whole documents, of which only those longer than a sample are cut, packed so that little "
        "room is left for padding; builds an index. Implies --reset-position-ids and --reset-attention-mask.",
    )
    data_cache_path: str | None = optional(
        "Directory of the indices of --dataset-order megatron and --dataset-packing best-fit, default "
        "PREFIX.orders beside the data, and of the tokens of text, default NAME.tokens beside it.",
        metavar="DIR",
    )
    object_storage_cache_path: str | None = optional(
        "Directory, on each node, for copies of PREFIX.idx of data paths s3://BUCKET/PREFIX; PREFIX.bin is "
        "read from the object store as samples need it.",
        metavar="DIR",
    )
    json_key: str = option(
        "text", "Text: the key of a JSON line, or the column of a Parquet file or an hf: data set."
    )
    append_eod: bool = switch(
        "Text: append the tokenizer's end-of-document token to each document, as preprocess_data.py does."
    )
    skip_bad_lines: bool = switch(
        "Text: skip lines without a document; otherwise such a line ends the run with an error."
    )
    mock_data: bool = switch("Use random tokens instead of a data set, to measure speed.")
    reset_position_ids: bool = switch("Count positions from 0 after each end-of-document token.")
    reset_attention_mask: bool = switch(
        "Let tokens attend only within their own document; an end-of-document token belongs to the document "
        "that it ends."
    )
    eod_mask_loss: bool = switch(
        "Omit the loss where the input is an end-of-document token. The loss is the mean over the remaining "
        "tokens of a micro-batch, then over micro-batches, unless --calculate-per-token-loss is given."
    )
    verify_data: bool = switch(
        "Before the first step, read every PREFIX.bin, a part per rank, and compare it with "
        "PREFIX.checksums.json. Costs one pass over the data."
    )
    num_workers: int = option(
        2,
        "Processes per rank that read ahead and tokenise text; 0: the rank does both itself.",
        at_least=0,
        at_most=1024,
    )

    def check(self) -> None:
        """Require exactly one source of data, and --data-path for --split."""
        own = [f"--{split}-data-path" for split in SPLITS if getattr(self, f"{split}_data_path")]
        if self.mock_data and (self.data_path or own):
            flag = "--data-path" if self.data_path else own[0]
            raise self.error("mock_data", f"reads no files; omit {flag} or --mock-data")
        if self.mock_data and self.verify_data:
            raise self.error("verify_data", "--mock-data reads no files; omit one of them")
        if self.mock_data and self.dataset_order != "windows":
            raise self.error("dataset_order", "--mock-data has no documents to order; omit one of them")
        if self.packs:
            self._check_packing()
        if self.data_path and own:
            raise option_error(
                own[0], "(given)", "--data-path is divided into all three splits; give one or the other"
            )
        if not (self.data_path or own or self.mock_data):
            raise self.error(
                "data_path",
                "a run needs data: --data-path PREFIX, or --train-data-path PREFIX, or --mock-data",
            )
        if self.split is not None and own:
            raise self.error("split", f"divides --data-path only; omit it with {own[0]}")
        split_shares(self.split or DEFAULT_SPLIT)
        for flag, entries in self._entries.items():
            _check_mixture(flag, entries)
        self._check_text()
        self._check_objects()

    def _check_packing(self) -> None:
        """Refuse samples that cannot be packed; separate the documents of those that can."""
        name = "dataset_packing"
        if self.mock_data:
            raise self.error(name, "--mock-data has no documents to pack; omit one of them")
        if self.dataset_order == "megatron":
            raise self.error(name, "orders samples itself; omit it or --dataset-order megatron")
        for _, path in self.sources():
            if is_text(path):
                fix = f"{path} is text, whose documents are not counted; run data/preprocess_data.py first"
                raise self.error(name, fix)
        for mask in ("reset_position_ids", "reset_attention_mask"):
            object.__setattr__(self, mask, True)  # __post_init__ is running: nobody has seen the old value

    def _check_text(self) -> None:
        """Refuse flags that need text without it, and flags that text cannot have."""
        paths = [path for _, path in self.sources()]
        texts = [path for path in paths if is_text(path)]
        if texts and self.dataset_order != "windows":
            fix = f"{texts[0]} is text, whose tokens are not counted; run data/preprocess_data.py first"
            raise self.error("dataset_order", fix)
        if texts and self.verify_data and len(texts) == len(paths):
            fix = "text has no .bin, and its cached tokens are checked at every read; omit this flag"
            raise self.error("verify_data", fix)
        for name, usual in (("json_key", "text"), ("append_eod", False), ("skip_bad_lines", False)):
            if getattr(self, name) != usual and not texts:
                text = "no data path names text, such as FILE.jsonl or 'DIR/*.parquet' does"
                raise self.error(name, f"applies to text, and {text}; name text so, or omit it")

    def _check_objects(self) -> None:
        """Require --object-storage-cache-path for data in an object store, and refuse text there."""
        flag, cache = "--object-storage-cache-path", self.object_storage_cache_path
        stored = [path for _, path in self.sources() if "://" in path and not is_hub(path)]
        for path in stored:
            check_location("--data-path", path)
            if is_text(path):
                fix = "text is read from files; copy it to one, or preprocess it and store .bin and .idx"
                raise option_error("--data-path", path, fix)
            if cache is None:
                raise option_error(flag, "(not given)", f"name a directory for the index of {path}")
        if cache is not None:
            local_path(flag, cache)
            if not stored:
                raise option_error(flag, cache, "applies to s3:// data paths, and there is none; omit it")
        if self.data_cache_path is not None:
            local_path("--data-cache-path", self.data_cache_path)

    def sources(self) -> tuple[tuple[float | None, str], ...]:
        """Return (weight, path) of every data set of every split."""
        return tuple(
            source for flag, entries in self._entries.items() for source in weighted_prefixes(flag, entries)
        )

    @property
    def _entries(self) -> dict[str, tuple[str, ...]]:
        """The entries of each flag that names data."""
        names = ("data_path", *(f"{split}_data_path" for split in SPLITS))
        return {flag_name(name): getattr(self, name) for name in names}

    def without_effect(self) -> tuple[str, ...]:
        """Return notes on flags, common in Megatron-LM's command lines, that have no effect on these data."""
        if self.mock_data:
            given = [("--split", self.split), ("--data-cache-path", self.data_cache_path)]
            return tuple(
                f"{flag} {value}: no effect: --mock-data reads no files" for flag, value in given if value
            )
        text = any(is_text(path) for _, path in self.sources())
        if self.data_cache_path is None or self.dataset_order == "megatron" or self.packs or text:
            return ()
        return (
            f"--data-cache-path {self.data_cache_path}: no effect: --dataset-order windows caches nothing",
        )

    @property
    def packs(self) -> bool:
        """Whether samples are packed of documents."""
        return self.dataset_packing == "best-fit"

    @property
    def masks_loss(self) -> bool:
        """Whether some targets have no loss: those after documents, or padding."""
        return self.eod_mask_loss or self.packs

    @property
    def masks(self) -> tuple[str, ...]:
        return tuple(name for name in MASKS if getattr(self, name))

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of --data-path for train, valid and test; they sum to 1."""
        return split_shares(self.split or DEFAULT_SPLIT)


_SHARES = r"""[.0-9\s,;:/|%'"()\[\]]*"""  # numbers, and what may be between and around them


def split_shares(text: str) -> tuple[float, float, float]:
    """Return '969,30,1' as shares that sum to 1; shares omitted at the end are 0. Raises ValueError.

    Numbers may be between other marks than commas, such as the quotes of "'99,1,0'" in Megatron-LM's scripts.
    An empty share, as in '1,,1', is refused.
    """
    numbers: list[float] = []
    if re.fullmatch(_SHARES, text) and not re.search(r"(^|,)\s*,", text):
        with suppress(ValueError):  # such as 1.2.3
            numbers = [float(number) for number in re.findall(r"[.0-9]+", text)]
    padded = [*numbers, 0.0, 0.0, 0.0][: len(SPLITS)]
    total = padded[0] + padded[1] + padded[2]
    if not (1 <= len(numbers) <= len(SPLITS) and 0 < total < math.inf):
        raise option_error("--split", text, f"must be up to three shares of 0 or more, as in {DEFAULT_SPLIT}")
    train, valid, test = (number / total for number in padded)
    return train, valid, test


def weighted_prefixes(flag: str, entries: tuple[str, ...]) -> tuple[tuple[float | None, str], ...]:
    """Return (weight, prefix) of each data set of a blend; all weights are None if the list has none.

    An entry that parses as a number is a weight (write ./7 for a data set called 7). Raises ValueError unless
    there are no weights or a positive, finite weight precedes each prefix.
    """
    numbers = [reader(float)(entry) for entry in entries]  # text where an entry is none
    if all(isinstance(number, str) for number in numbers):
        return tuple((None, prefix) for prefix in entries)
    weights = [number for number in numbers[::2] if isinstance(number, float)]
    if 2 * len(weights) != len(entries) or any(isinstance(number, float) for number in numbers[1::2]):
        raise option_error(flag, entries, "must be prefixes alone, or a weight before each prefix")
    for weight, shown in zip(weights, entries[::2], strict=True):
        if not (0 < weight < math.inf):
            raise option_error(flag, entries, f"the weight {shown} must be a positive, finite number")
    return tuple(zip(weights, entries[1::2], strict=True))


def _check_mixture(flag: str, entries: tuple[str, ...]) -> None:
    """Raise ValueError for invalid weights, and for missing ones: the tokens of text are not counted."""
    paths = [path for weight, path in weighted_prefixes(flag, entries) if weight is None]
    texts = [path for path in paths if is_text(path)]
    if len(paths) > 1 and texts and (len(texts) < len(paths) or any(map(is_hub, texts))):
        fix = "put a weight before each; only tokenised data, or only files of text, can be mixed by size"
        raise option_error(flag, entries, fix)
