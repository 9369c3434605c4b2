"""Opens what a run reads: indexed data sets, text, or random tokens."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_zpp.config.root import Config
from megatron_zpp.data.open import SplitOpener, Splits
from megatron_zpp.train.schedule.run_schedule import RunSchedule


def open_data(
    config: Config,
    schedule: RunSchedule,
    tokenizer: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    train_samples: int | None = None,
) -> Splits:
    """The splits of a run, checked. `tokenizer` describes its tokenizer; `say` gets a line on slow work.

    Megatron-LM's order of the training samples is built for `train_samples`, or, if that is None, for the
    number that the flags ask for. Raises ValueError for data that cannot be read to the end of the run.
    """
    requested = schedule.requested_samples(config.training, config.evaluation)
    if train_samples is not None:
        requested["train"] = train_samples
    opener = SplitOpener(
        config=config.data,
        seq_length=config.model.seq_length,
        vocab_size=tokenizer["vocab_size"],
        seed=config.training.seed,
        tokenizer=config.tokenizer,
        tokenizer_description=tokenizer,
        requested=requested,
        evaluated=schedule.evaluated_samples(config.evaluation),
        say=say,
    )
    splits = opener.open(config.needed_splits())
    assert splits.train is not None  # every run trains
    schedule.check_data(splits.train)
    return splits
