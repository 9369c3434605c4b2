"""Opens what a run reads (indexed data sets, text, or random tokens) and, on request, verifies all of it."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.together import read_together
from megatron_zpp.config.root import Config
from megatron_zpp.data.open import Splits, TextSlice, open_splits
from megatron_zpp.data.verify import verify_tokens
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.checksums import DamagedFile
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
    splits = open_splits(
        config.data,
        seq_length=config.model.seq_length,
        vocab_size=tokenizer["vocab_size"],
        seed=config.training.seed,
        tokenizer_description=tokenizer,
        needed=config.needed_splits(),
        requested=requested,
        say=say,
        open_text=partial(
            _open_text, data=config.data, tokenizer=config.tokenizer, description=tokenizer, say=say
        ),
        evaluated=schedule.evaluated_samples(config.evaluation),
    )
    assert splits.train is not None  # every run trains
    schedule.check_data(splits.train)
    return splits


def _open_text(flag: str, path: str, **settings: Any) -> TextSlice:
    from megatron_zpp.data.text.open import open_text

    return open_text(flag, path, **settings)


def verify_data(splits: Splits, exchange: Exchange) -> str:
    """Read every .bin, one part per rank, and return a line for the log; every rank must call it.

    Raises DamagedFile on every rank if any rank finds damage, ValueError if any cannot read or makes no
    progress.
    """
    started, topology = time.perf_counter(), exchange.topology
    verify = partial(verify_tokens, splits.files, topology.rank, topology.world_size)
    _, problem = read_together(verify, exchange, FileWorker(), "--verify-data", "(given)")
    if problem:
        raise DamagedFile(problem)
    size = sum(data.tokens.nbytes for data in splits.files)
    return f" verified {size:,} bytes of tokens in {time.perf_counter() - started:.1f} s"
