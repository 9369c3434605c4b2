"""What a run is told and what it reads, checked before a device is taken."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.options import option_error, usage_errors
from megatron_zpp.config.root import Config
from megatron_zpp.config.shapes.tensor_parallel import check_vocabulary
from megatron_zpp.data.open import SplitOpener, Splits
from megatron_zpp.mesh import Mesh
from megatron_zpp.reporting.sinks import check_sinks
from megatron_zpp.tokenizer.base import Tokenizer, describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.train.resume.start import check_start
from megatron_zpp.train.schedule.run_schedule import RunSchedule


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The flags of a run, its tokenizer's description and files, its schedule from iteration 0, its data."""

    config: Config
    tokenizer: dict[str, Any]
    tokenizer_files: Mapping[str, bytes]  # what checkpoints keep of it
    schedule: RunSchedule
    splits: Splits


def check_inputs(config: Config, mesh: Mesh, say: Callable[[str], None]) -> RunInputs:
    """Open and check everything that this process can check without a device or the other ranks.

    `mesh` is that of the run; values that are auto are replaced by what a plan for it finds. `say` gets a
    line about work that takes long. Raises ValueError for settings, data, checkpoints or places to write to
    with which the run could not end well.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    description = describe(tokenizer)
    vocab_size = description["vocab_size"]
    if config.automatic:
        from megatron_zpp.train.auto import resolved

        config, chosen = resolved(config, vocab_size, mesh)
        if mesh.rank == 0:
            say(chosen)
    with usage_errors():
        schedule = RunSchedule.from_config(
            config.training,
            config.learning_rate,
            mesh.data_ranks,
            seq_length=config.model.seq_length,
            islands=config.islands.count,
        )
    batches = schedule.batches
    most = batches.global_batch_size // (batches.micro_batch_size * batches.data_parallel_size)
    with usage_errors():
        config.optimizer.check_batch(mesh.world_size, most)
    tensor_ranks = config.distributed.tensor_model_parallel_size
    check_vocabulary(config.model, config.precision, vocab_size, tensor_ranks)
    check_prompts(config.evaluation.sample_prompt or (), tokenizer)
    splits = open_data(config, schedule, description, say)
    if not (config.plan.dry_run and config.checkpoint.huggingface):  # a plan downloads no weights
        check_start(config.checkpoint, config.model, description)
    if config.islands.island_secret is not None and not config.plan.dry_run:
        from megatron_zpp.config.values.addresses import read_secret

        read_secret("--island-secret", config.islands.island_secret)
    check_sinks(config.logging, runs=not config.plan.dry_run)
    if config.timing.profile:
        from megatron_zpp.reporting.profile import check_profile

        check_profile(config.logging)
    return RunInputs(
        config=config,
        tokenizer=description,
        tokenizer_files=tokenizer.files,
        schedule=schedule,
        splits=splits,
    )


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
        keeps_orders=not config.plan.dry_run,
        say=say,
    )
    splits = opener.open(config.needed_splits())
    schedule.check_data(splits.train)
    return splits


def check_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a --sample-prompt that `tokenizer` has no ids for, or that has no tokens."""
    for prompt in prompts:
        try:
            ids = tokenizer.encode(prompt)
        except ValueError as error:
            raise option_error("--sample-prompt", prompt, str(error)) from None
        if not ids:
            raise option_error("--sample-prompt", prompt, "has no tokens; give text that has some")
