"""Where a run starts: checked before anything is built, and the run's name."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.directory import TRACKER, each_candidate, iteration_of, newest_first
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.storage.files import check_writable
from megatron_zpp.storage.location import is_object, location


@dataclass(frozen=True)
class Start:
    """The progress that a run starts from, and log lines that say where it was loaded from.

    By default new weights.
    """

    progress: Progress = Progress()
    lines: Sequence[str] = (" starting from initial weights",)


def check_start(config: CheckpointConfig, model: ModelConfig, tokenizer: dict[str, Any]) -> None:
    """Raise ValueError, before anything is built, for a --load or --save that cannot be used."""
    if config.save:
        check_writable("--save", config.save)
        if not is_object(config.save) and (Path(config.save) / TRACKER).is_dir():
            raise option_error("--save", config.save, f"its {TRACKER} is a directory; remove that")
    if config.load is None:
        _check_nothing_newer(config, start=0)
        return
    if config.huggingface:
        from megatron_zpp.checkpoint.huggingface.importing import open_weights

        open_weights(config.huggingface, model, tokenizer).close()
        _check_nothing_newer(config, start=0)
        return
    if found := next(each_candidate(config.load, config.ckpt_step), None):
        if config.finetune or config.ckpt_step is not None or not config.saves_where_it_loads:
            _check_nothing_newer(config, start=0 if config.finetune else iteration_of(found) or 0)
        return
    if config.exit_on_missing_checkpoint:
        raise option_error(
            "--load", config.load, "holds no checkpoint, and --exit-on-missing-checkpoint is given"
        )
    if not config.saves_where_it_loads:
        raise option_error(
            "--load", config.load, "holds no checkpoint; only a --load equal to --save may still be empty"
        )


def _check_nothing_newer(config: CheckpointConfig, *, start: int) -> None:
    """Raise ValueError if --save has a checkpoint newer than iteration `start`: the next start would load it.

    It would go on from another run's weights, or from those that this run went back from.
    """
    if config.save is None:
        return
    try:
        path = next(newest_first(location(config.save)), None)
    except OSError as error:
        raise option_error(
            "--save", config.save, f"{one_line(error)}; name a directory that can be read"
        ) from None
    if path is None or (iteration_of(path) or 0) <= start:
        return
    if config.ckpt_step is not None:
        fix = f"{path.name} in --save {config.save} is newer, and the next start would load it; move it away"
        raise option_error("--ckpt-step", config.ckpt_step, f"{fix}, or give another --save")
    resume = f"give --load {config.save}{' without --finetune' if config.finetune else ''} to resume from it"
    fix = f"the run starts at iteration {start}, and the next start would load {path.name} there"
    raise option_error("--save", config.save, f"{fix}; {resume}, or another --save")


def named(progress: Progress, config: CheckpointConfig, exchange: Exchange) -> Progress:
    """`progress` with the name of the run: a new one unless the run resumes in the directory it saves to."""
    if progress.run and config.saves_where_it_loads:
        return progress
    if exchange.topology.rank == 0:
        exchange.put("name", secrets.token_hex(4))
    return replace(progress, run=exchange.get("name"))
