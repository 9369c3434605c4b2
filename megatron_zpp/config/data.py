"""Which tokens a run reads, and how they are cut into train, valid and test."""

import math
from dataclasses import dataclass

from megatron_zpp.config.options import Options, option, refusal

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """data: where the tokens come from"""

    data_path: tuple[str, ...] = option(
        (),
        "Prefix of PREFIX.bin and PREFIX.idx, cut by --split; or several, mixed in proportion to their "
        "tokens; or WEIGHT PREFIX WEIGHT PREFIX …",
    )
    train_data_path: tuple[str, ...] = option((), "As --data-path, all of it for training.")
    valid_data_path: tuple[str, ...] = option((), "As --data-path, all of it for validation.")
    test_data_path: tuple[str, ...] = option((), "As --data-path, all of it for the test at the end.")
    split: str | None = option(
        None,
        "Shares of --data-path for train, valid and test, cut in this order between documents "
        f"[{DEFAULT_SPLIT}]",
    )
    mock_data: bool = option(False, "Random tokens instead of a data set, to measure speed.")
    verify_data: bool = option(
        False,
        "Read every PREFIX.bin before the first step, each rank its part, and compare it with "
        "PREFIX.checksums.json.",
    )
    num_workers: int = option(
        2, "Processes that read ahead for each rank; 0 reads in the rank itself.", at_least=0, at_most=1024
    )

    def check(self) -> None:
        """Exactly one source of data, and --split only where it cuts something."""
        own = [f"--{split}-data-path" for split in SPLITS if getattr(self, f"{split}_data_path")]
        if self.mock_data and (self.data_path or own):
            flag = "--data-path" if self.data_path else own[0]
            raise refusal("--mock-data", "(given)", f"reads no files; leave out {flag} or --mock-data")
        if self.mock_data and self.verify_data:
            raise refusal("--verify-data", "(given)", "--mock-data reads no files; leave out one of them")
        if self.data_path and own:
            raise refusal(
                own[0], "(given)", "--data-path is cut into all three splits; give one or the other"
            )
        if not (self.data_path or own or self.mock_data):
            raise refusal(
                "--data-path",
                "(not given)",
                "a run needs data: --data-path PREFIX, or --train-data-path PREFIX, or --mock-data",
            )
        if self.split is not None and not self.data_path:
            raise refusal(
                "--split", self.split, f"cuts --data-path alone; leave it out with {(*own, '--mock-data')[0]}"
            )
        split_shares(self.split or DEFAULT_SPLIT)
        for flag in ("data_path", *(f"{split}_data_path" for split in SPLITS)):
            weighted_prefixes("--" + flag.replace("_", "-"), getattr(self, flag))

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
        raise refusal("--split", text, f"must be up to three shares of 0 or more, as in {DEFAULT_SPLIT}")
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
    weights, prefixes = numbers[::2], numbers[1::2]
    alternating = len(weights) == len(prefixes) and None not in weights and set(prefixes) == {None}
    if not alternating:
        raise refusal(flag, entries, "must be prefixes alone, or a weight before each prefix")
    for weight, shown in zip(weights, entries[::2], strict=True):
        if not (0 < weight < math.inf):
            raise refusal(flag, entries, f"the weight {shown} must be a positive, finite number")
    return tuple(zip(weights, entries[1::2], strict=True))


def _number(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None
