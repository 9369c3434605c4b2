"""Measures a checkpoint on text: `megatron-zpp evaluate --load DIR --valid-data FILE …`.

On several ranks (launch/local.sh -m megatron_zpp evaluate …, or torchrun -m) each rank scores its
share of the batches, and the figures are the same.
"""

import itertools
import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_zpp.config.command_line import command_groups, program_name
from megatron_zpp.config.options import REQUIRED, Options, count, option, option_error, optional
from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.data.corpus.inputs import find_files
from megatron_zpp.distributed.agreement import check_agreement
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.generate.loading import CheckpointOptions, DeviceOptions, load_together
from megatron_zpp.generate.scoring import score_passages
from megatron_zpp.generate.tasks import Outcome, Task, lambada_task, outcome_of, perplexity_task
from megatron_zpp.model.gpt import GPT
from megatron_zpp.reporting.metrics import finite
from megatron_zpp.storage.files import check_replaceable, write_text
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.heartbeat import heartbeat
from megatron_zpp.supervision.process import Process
from megatron_zpp.tokenizer.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Options):
    """evaluation: task, data and batches"""

    task: Literal["perplexity", "lambada"] = option(
        "perplexity", "perplexity of all tokens; lambada: is the last word of each JSON line the likeliest?"
    )
    valid_data: tuple[str, ...] = option(
        REQUIRED, "Files, globs or folders: JSON lines of documents; any other file is one document."
    )
    json_key: str = option("text", "JSON lines: the key of the text.")
    seq_length: int | None = count(None, "Context length in tokens; default that of the training.")
    stride: int | None = count(
        None, "perplexity: tokens from one window to the next; default --seq-length, windows side by side."
    )
    micro_batch_size: int = count(4, "Windows or lines scored at once.")
    output: str | None = optional("Write the figures to this JSON file.")

    def check(self) -> None:
        """Refuse a stride without windows."""
        if self.stride is not None and self.task != "perplexity":
            raise self.error("stride", f"has no meaning with --task {self.task}")

    def width(self, model: GPT) -> int:
        """Context length. Raises ValueError if the model is shorter or a stride would skip tokens."""
        config = model.config
        width = self.seq_length or config.seq_length
        if width > config.max_position_embeddings:
            raise option_error(
                "--seq-length", width, f"must be at most the model's {config.max_position_embeddings}"
            )
        if self.stride is not None and self.stride > width:
            raise self.error("stride", f"must be at most --seq-length {width}; else tokens are skipped")
        return width


GROUPS = {"model": CheckpointOptions, "device": DeviceOptions, "evaluation": EvaluateConfig}
# For ranks that have scored their share to wait; the heartbeat detects dead ranks.
_PATIENCE = timedelta(days=7)


def main() -> None:
    """Connect the ranks and score this rank's share; rank 0 prints the figures of all."""
    process = Process.start(program_name())
    topology = process.topology
    with process.local_errors():
        options = command_groups(GROUPS, __doc__)
        config: EvaluateConfig = options["evaluation"]
        if config.output:
            check_replaceable("--output", config.output)
        files = find_files("--valid-data", config.valid_data, output=config.output)
        distributed = DistributedConfig()
        device = select_device(options["device"].device, topology)
    met = process.connect(distributed)
    timeout = distributed.heartbeat_timeout
    with (
        process.shared_errors(),
        heartbeat(met.store, topology, timeout, process.prog, lifelines=met.lifelines) as activity,
    ):
        activity.now("loading", patient=True)
        exchange = Exchange(met.store, topology, _PATIENCE, "evaluate")
        model, tokenizer = load_together(options["model"], device, exchange)
        task = build_task(config, files, model, tokenizer)
        text = {"passages": len(task.passages), "words": task.words, "bytes": task.characters_utf8}
        check_agreement({"--valid-data": text}, exchange, "give all nodes the same files")
        outcomes = score_together(task, model, config.micro_batch_size, exchange, activity)
        if topology.rank == 0:
            report(task.figures(outcomes), config, device, model.embedding.tokens.weight.dtype)


def build_task(config: EvaluateConfig, files: list[str], model: GPT, tokenizer: Tokenizer) -> Task:
    """The passages of --task; the same on every rank."""
    width = config.width(model)
    if config.task == "lambada":
        return lambada_task(files, config.json_key, tokenizer, width=width)
    return perplexity_task(files, config.json_key, tokenizer, width=width, stride=config.stride or width)


def score_together(
    task: Task, model: GPT, batch_size: int, exchange: Exchange, activity: Activity
) -> list[Outcome]:
    """The outcome of each passage, on every rank; each rank scores its share of the batches.

    Batches, and so the roundings in them, do not depend on the number of ranks.
    """
    topology = exchange.topology
    starts = range(0, len(task.passages), batch_size)[topology.rank :: topology.world_size]
    mine = [passage for start in starts for passage in task.passages[start : start + batch_size]]
    numbers = itertools.count(1)

    def next_batch() -> None:
        activity.now(f"scoring batch {next(numbers)} of {len(starts)}", patient=True)

    scores = [outcome_of(score) for score in score_passages(model, mine, batch_size, next_batch)]
    activity.now("waiting for the others' scores", patient=True)
    return [outcome for share in exchange.all_gather("scores", scores) for outcome in map(tuple, share)]


def report(figures: dict[str, Any], config: EvaluateConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Write one line per figure to stdout, and all figures to --output, with null for NaN and inf."""
    said = {"task": config.task, "valid_data": list(config.valid_data), "device": device.type}
    said |= {"precision": str(dtype).removeprefix("torch."), **figures}
    for name, value in said.items():
        sys.stdout.write(f"{name:>17}: {_shown(value)}\n")
    sys.stdout.flush()
    if config.output:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(config.output), json.dumps(finite(said), indent=2, allow_nan=False) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(value) if isinstance(value, list) else str(value)
