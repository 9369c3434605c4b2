"""`Run`, what one run is made of, and the builder that finds out where it starts."""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.data.open import Splits, seed_of
from megatron_zpp.data.resume import resume_data
from megatron_zpp.distributed.agreement import check_agreement
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.train.inputs import RunInputs, open_data
from megatron_zpp.train.resume.start import Start, named
from megatron_zpp.train.setup.ranks import Ranks
from megatron_zpp.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from megatron_zpp.islands.outer_state import OuterState


@dataclass(frozen=True, kw_only=True)
class Run(RunInputs):
    """What one run is made of, ready for its first step. Nothing in it is decided later.

    Its data and schedule are those from the start of this process on.
    """

    ranks: Ranks
    # Model and its state: new, or loaded from a checkpoint
    engine: ZeroEngine
    start: Progress
    outer: "OuterState | None"  # with outer steps
    # Log
    reporter: Reporter
    lines: tuple[str, ...]  # on what happened before the first step


def build_run(inputs: RunInputs, engine: ZeroEngine, ranks: Ranks) -> Run:
    """Load the checkpoint, if there is one, into `engine` and continue the data where it ended.

    Every rank must call it. Raises ValueError if ranks have different data or tokenizers, no checkpoint of
    --load is whole, or the data do not fit them; DamagedFile if --verify-data finds damage.
    """
    config, splits, lines = inputs.config, inputs.splits, list(ranks.lines)
    exchange_for = partial(Exchange, ranks.store, ranks.topology, config.distributed.timeout)
    data = {source.name: source.fingerprint() for source in (*splits.files, *splits.texts)}
    same = {"data": data, "tokenizer": inputs.tokenizer}
    check_agreement(same, exchange_for("data"), "give all nodes the same files")
    if config.data.verify_data:
        ranks.activity.now("verifying data", patient=True)
        lines.append(_verified(splits, exchange_for("verify-data")))
    ranks.activity.now("loading", patient=True)
    loaded, outer = Start(), None
    if config.islands.takes_outer_steps:
        from megatron_zpp.islands.outer_state import outer_state

        outer = outer_state(engine, config)
    if config.checkpoint.load is not None:
        from megatron_zpp.train.resume.restore import restore

        loaded = restore(config, engine, inputs.tokenizer, ranks.store, inputs.schedule)
    progress = named(loaded.progress, config.checkpoint, exchange_for("run"))
    if outer is None or not (progress.iteration and config.checkpoint.load_optim):
        progress = replace(progress, exchange_begun=None)  # the weights that it sent are not loaded
        if outer is not None:
            outer.begin()
    if config.data.dataset_order == "megatron":
        splits, progress = _in_its_order(inputs, progress, lines)
    schedule = inputs.schedule.resumed(progress)
    resumed = resume_data(
        splits.train,
        progress.dataset_progress,
        consumed=progress.consumed_samples * schedule.islands,
        data=config.data,
        train_seed=seed_of("train", config.training.seed),
    )
    if config.islands.islands_at is not None:
        from megatron_zpp.data.islands import share_of

        resumed = share_of(resumed, config.islands)
    progress = replace(progress, dataset_progress=resumed.dataset_progress)
    epochs = schedule.describe_epochs(resumed.samples)
    if config.checkpoint.save is not None and ranks.topology.rank == 0:
        from megatron_zpp.train.setup.run_file import write_run_file

        lines += write_run_file(config, config.checkpoint.save, ranks.topology, ranks.lease)
    reporter = Reporter(
        config.logging,
        config.to_json(),
        ranks.topology,
        iterations=schedule.iterations,
        start=progress,
        writing=ranks.activity.writing,
    )
    return Run(
        **vars(inputs) | {"splits": replace(splits, train=resumed.samples), "schedule": schedule},
        ranks=ranks,
        engine=engine,
        start=progress,
        outer=outer,
        reporter=reporter,
        lines=(*lines, *loaded.lines, *resumed.lines, *epochs),
    )


def _verified(splits: Splits, exchange: Exchange) -> str:
    """Read every .bin, one part per rank, and return a line for the log; every rank must call it.

    Raises DamagedFile on every rank if any rank finds damage, ValueError if any cannot read or makes no
    progress.
    """
    from megatron_zpp.checkpoint.file_worker import FileWorker
    from megatron_zpp.checkpoint.together import read_together
    from megatron_zpp.data.indexed import verify_tokens

    started, topology = time.perf_counter(), exchange.topology
    verify = partial(verify_tokens, splits.files, topology.rank, topology.world_size)
    _, problem = read_together(verify, exchange, FileWorker(), "--verify-data", "(given)")
    if problem:
        raise DamagedFile(problem)
    size = sum(data.tokens.nbytes for data in splits.files)
    return f" verified {size:,} bytes of tokens in {time.perf_counter() - started:.1f} s"


def _in_its_order(inputs: RunInputs, progress: Progress, lines: list[str]) -> tuple[Splits, Progress]:
    """The splits with training samples in Megatron-LM's order for as many samples as `progress` says.

    The splits of `inputs` were opened, before a checkpoint was read, for the number that the flags ask for.
    `lines` for the log get one for each order that has to be built.
    """
    config, schedule = inputs.config, inputs.schedule
    requested = schedule.requested_samples(config.training, config.evaluation)["train"]
    if progress.ordered_samples in (None, requested):
        return inputs.splits, replace(progress, ordered_samples=requested)
    reopened = open_data(
        config,
        schedule,
        inputs.tokenizer,
        lambda line: lines.append(f" {line}"),
        train_samples=progress.ordered_samples,
    )
    return replace(inputs.splits, train=reopened.train), progress
