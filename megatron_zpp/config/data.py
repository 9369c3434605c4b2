"""Which tokens a run reads, and how they are cut into train, valid and test."""

import math
from dataclasses import dataclass
from typing import Literal

from megatron_zpp.config.options import Options, option, option_error
from megatron_zpp.config.text import is_hub, is_text

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")
MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """data: where the tokens come from"""

    data_path: tuple[str, ...] = option(
        (),
        "Prefix of PREFIX.bin and PREFIX.idx, cut by --split; or several, mixed in proportion to their "
        "tokens; or WEIGHT PREFIX WEIGHT PREFIX …; text, FILE.jsonl[.gz, .zst] or hf:NAME[:CONFIG[:SPLIT]], "
        "may stand for a PREFIX.",
    )
    train_data_path: tuple[str, ...] = option((), "As --data-path, all of it for training.")
    valid_data_path: tuple[str, ...] = option((), "As --data-path, all of it for validation.")
    test_data_path: tuple[str, ...] = option((), "As --data-path, all of it for the test at the end.")
    split: str | None = option(
        None,
        "Shares of --data-path for train, valid and test, cut in this order between documents "
        f"[{DEFAULT_SPLIT}]",
        metavar="SHARES",
    )
    dataset_order: Literal["windows", "megatron"] = option(
        "windows",
        "windows: needs no index; megatron: Megatron-LM's samples, in its order.",
    )
    data_cache_path: str | None = option(
        None,
        "Directory of what --dataset-order megatron builds, default PREFIX.orders beside the first data set; "
        "and of the tokens of text, default NAME.tokens beside it.",
        metavar="DIR",
    )
    json_key: str = option("text", "Key of a JSON line, or column of an hf: data set, that holds the text.")
    append_eod: bool = option(
        False, "End each document of text with the tokenizer's end of document, as preprocess_data.py does."
    )
    skip_bad_lines: bool = option(
        False, "Leave out lines of text that hold no document, where a run would end with an error."
    )
    mock_data: bool = option(False, "Random tokens instead of a data set, to measure speed.")
    reset_position_ids: bool = option(False, "Count positions from 0 after each end of document.")
    reset_attention_mask: bool = option(
        False, "Tokens attend inside their own document alone; an end of document belongs to what it ends."
    )
    eod_mask_loss: bool = option(
        False,
        "No loss where the input is an end of document. The loss is the mean over the tokens of a "
        "micro-batch that count, and then over micro-batches.",
    )
    verify_data: bool = option(
        False,
        "Read every PREFIX.bin before the first step, each rank its part, and compare it with "
        "PREFIX.checksums.json.",
    )
    num_workers: int = option(
        2,
        "Processes that read ahead, and tokenise text, for each rank; 0 does both in the rank itself.",
        at_least=0,
        at_most=1024,
    )

    def check(self) -> None:
        """Exactly one source of data, and --split only where it cuts something."""
        own = [f"--{split}-data-path" for split in SPLITS if getattr(self, f"{split}_data_path")]
        if self.mock_data and (self.data_path or own):
            flag = "--data-path" if self.data_path else own[0]
            raise option_error("--mock-data", "(given)", f"reads no files; leave out {flag} or --mock-data")
        if self.mock_data and self.verify_data:
            raise option_error(
                "--verify-data", "(given)", "--mock-data reads no files; leave out one of them"
            )
        if self.mock_data and self.dataset_order != "windows":
            fix = "--mock-data has no documents to put in order; leave out one of them"
            raise option_error("--dataset-order", self.dataset_order, fix)
        if self.data_path and own:
            raise option_error(
                own[0], "(given)", "--data-path is cut into all three splits; give one or the other"
            )
        if not (self.data_path or own or self.mock_data):
            raise option_error(
                "--data-path",
                "(not given)",
                "a run needs data: --data-path PREFIX, or --train-data-path PREFIX, or --mock-data",
            )
        if self.split is not None and not self.data_path:
            raise option_error(
                "--split", self.split, f"cuts --data-path alone; leave it out with {(*own, '--mock-data')[0]}"
            )
        split_shares(self.split or DEFAULT_SPLIT)
        for flag in ("data_path", *(f"{split}_data_path" for split in SPLITS)):
            _check_mixture("--" + flag.replace("_", "-"), getattr(self, flag))
        self._check_text()

    def _check_text(self) -> None:
        """What is for text alone, or not for text."""
        paths = [path for _, path in self.sources()]
        texts = [path for path in paths if is_text(path)]
        if texts and self.dataset_order != "windows":
            fix = f"{texts[0]} is text, whose tokens are not counted; run data/preprocess_data.py first"
            raise option_error("--dataset-order", self.dataset_order, fix)
        if texts and self.verify_data and len(texts) == len(paths):
            fix = (
                "text has no .bin; what is kept of its tokens is checked whenever it is read; leave this out"
            )
            raise option_error("--verify-data", "(given)", fix)
        for flag, value in (
            ("--json-key", self.json_key if self.json_key != "text" else None),
            ("--append-eod", "(given)" if self.append_eod else None),
            ("--skip-bad-lines", "(given)" if self.skip_bad_lines else None),
        ):
            if value and not texts:
                raise option_error(flag, value, "is about text, and no data path names any; leave it out")

    def sources(self) -> tuple[tuple[float | None, str], ...]:
        """(weight, path) of everything that the splits are given."""
        flags = ("data_path", *(f"{split}_data_path" for split in SPLITS))
        named = [weighted_prefixes("--" + flag.replace("_", "-"), getattr(self, flag)) for flag in flags]
        return tuple(source for sources in named for source in sources)

    @property
    def masks(self) -> tuple[str, ...]:
        """Those of MASKS that are given."""
        return tuple(name for name in MASKS if getattr(self, name))

    @property
    def shares(self) -> tuple[float, float, float]:
        """The parts of --data-path for train, valid and test; they sum to 1."""
        return split_shares(self.split or DEFAULT_SPLIT)


def split_shares(text: str) -> tuple[float, float, float]:
    """'969,30,1' as shares that sum to 1; shares left out at the end are 0. Raises ValueError."""
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    padded = [*numbers, 0.0, 0.0, 0.0][: len(SPLITS)]
    total = padded[0] + padded[1] + padded[2]
    usable = all(number >= 0 and math.isfinite(number) for number in numbers)
    if not (1 <= len(numbers) <= len(SPLITS) and usable and 0 < total < math.inf):
        raise option_error("--split", text, f"must be up to three shares of 0 or more, as in {DEFAULT_SPLIT}")
    train, valid, test = (number / total for number in padded)
    return train, valid, test


def weighted_prefixes(flag: str, entries: tuple[str, ...]) -> tuple[tuple[float | None, str], ...]:
    """(weight, prefix) of each data set of a blend; the weight is None where the list has none.

    An entry that reads as a number is a weight (write ./7 for a data set of that name). Raises ValueError
    unless there are no weights at all or there is a positive, finite one before each prefix.
    """
    numbers = [_number(entry) for entry in entries]
    if all(number is None for number in numbers):
        return tuple((None, prefix) for prefix in entries)
    weights = [number for number in numbers[::2] if number is not None]
    if 2 * len(weights) != len(entries) or any(number is not None for number in numbers[1::2]):
        raise option_error(flag, entries, "must be prefixes alone, or a weight before each prefix")
    for weight, shown in zip(weights, entries[::2], strict=True):
        if not (0 < weight < math.inf):
            raise option_error(flag, entries, f"the weight {shown} must be a positive, finite number")
    return tuple(zip(weights, entries[1::2], strict=True))


def _check_mixture(flag: str, entries: tuple[str, ...]) -> None:
    """Raises ValueError for weights that are none, and where they are needed: nobody has counted text."""
    paths = [path for weight, path in weighted_prefixes(flag, entries) if weight is None]
    texts = [path for path in paths if is_text(path)]
    if len(paths) > 1 and texts and (len(texts) < len(paths) or any(map(is_hub, texts))):
        fix = "put a weight before each; only tokenised data, or files of text, are mixed by their size"
        raise option_error(flag, entries, fix)


def _number(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None
