"""Builds the engine, puts it together with its data and its schedule, and trains."""

import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.root import Config
from megatron_zpp.data.open import Splits, seed_of
from megatron_zpp.data.resume import resume_data
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.fp8 import Float8Linear
from megatron_zpp.model.gpt import GPT, ModelComponents, norm_class
from megatron_zpp.plan.advice import accumulation_advice
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.reporting.metrics import Throughput
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.storage.lease import Lease
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.train.compiling import compile_parts, prepare_compiler
from megatron_zpp.train.device import Device, check_attention
from megatron_zpp.train.dry_run import job_of
from megatron_zpp.train.loop import Trainer
from megatron_zpp.train.reading import open_data
from megatron_zpp.train.restore import restore
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.sampled_text import sample_text
from megatron_zpp.train.saver import Saver
from megatron_zpp.train.stopping import Stop, StopConditions
from megatron_zpp.train.verify import verify_data
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.sections import UNTIMED, TimedSections


@dataclass(frozen=True)
class Ending:
    """How a run ended: `stop` is why before its time; `lost_sinks` says that some were."""

    iteration: int
    stop: Stop | None
    lost_sinks: bool

    def leave(self, prog: str, rank: int) -> None:
        """Leaves the process with the status that says how it ended; returns when there is nothing to say."""
        if self.stop and self.stop.is_error and rank == 0:
            sys.stderr.write(f"{prog}: error: iteration {self.iteration}: {self.stop}\n")
        status = self.stop.status if self.stop else 0
        if self.lost_sinks:  # what they left to be done at exit would fail again, or hang
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if status:
            sys.exit(status)


def build_engine(config: Config, tokenizer: dict[str, Any], device: Device, topology: Topology) -> ZeroEngine:
    """The model with its initial weights, sharded over the ranks that have joined.

    Raises ValueError for a kernel of attention that does not run on the device.
    """
    check_attention(config, device)
    linear = Float8Linear if config.precision.fp8 else nn.Linear
    parts = ModelComponents(norm_class(device.fused_backend), linear, device.attention)
    with torch.device("meta"):
        model = GPT(config.model, tokenizer["vocab_size"], config.recompute, parts)
    if device.compiles:
        prepare_compiler(config.compilation, topology, os.environ)
        shape = (config.training.micro_batch_size, config.model.seq_length)
        on_gpu = device.device.type == "cuda"
        compile_parts(model, shape, device.say, masked=config.data.reset_attention_mask, on_gpu=on_gpu)
    return ZeroEngine(
        model,
        partial(model.initialize_parameter, seed=config.training.seed),
        zero=config.zero,
        optimizer=config.optimizer,
        precision=config.precision,
        topology=topology,
        device=device.device,
        fused_backend=device.fused_backend,
        operations=device.operations,
        timeout=config.distributed.timeout,
        sections=TimedSections(device.device) if config.timing.level else UNTIMED,
        say=device.say,
    )


def train(
    engine: ZeroEngine,
    splits: Splits,
    config: Config,
    schedule: RunSchedule,
    tokenizer: dict[str, Any],
    store: dist.Store,
    signals: StopSignals,
    activity: Activity,
    joining: list[str],
    lease: Lease | None = None,
) -> Ending:
    """Goes on from --load, or begins, and trains to the end; `tokenizer` describes the one of the data.

    `store` is what all ranks share beside their collectives. A signal ends the run sooner; `activity` is told
    what is being done; `joining` has lines for the log on how the ranks came together.
    """
    dtype = config.precision.compute_dtype(engine.device.type)
    throughput = Throughput.of(
        config.model,
        tokenizer["vocab_size"],
        devices=engine.topology.world_size,
        device=engine.device,
        dtype=dtype,
        peak=config.logging.device_peak_tflops,
    )
    lines = list(joining)
    if config.data.verify_data:
        activity.now("verifying data", patient=True)
        timeout = config.distributed.timeout
        lines.append(verify_data(splits, Exchange(store, engine.topology, timeout, "verify-data")))
    activity.now("loading", patient=True)
    progress, start_lines = restore(config, engine, tokenizer, store, schedule)
    if config.data.dataset_order == "megatron":
        splits, progress = _in_its_order(splits, progress, config, schedule, tokenizer, lines)
    schedule = schedule.resumed(progress)
    resumed = resume_data(
        splits.train,
        progress.dataset_progress,
        consumed=progress.consumed_samples,
        data=config.data,
        train_seed=seed_of("train", config.training.seed),
    )
    splits, progress = (
        replace(splits, train=resumed.samples),
        replace(progress, dataset_progress=resumed.dataset_progress),
    )
    epochs = schedule.describe_epochs(splits.train)
    reporter = Reporter(
        config.logging,
        config.to_json(),
        engine.topology,
        iterations=schedule.iterations,
        start=progress,
    )
    with reporter:
        head = _head(engine, splits, config, tokenizer, dtype)
        plan = _plan_lines(engine, config, tokenizer, schedule)
        for line in (*head, *plan, *lines, *start_lines, *resumed.lines, *epochs):
            reporter.say(line)
        if progress.iteration >= schedule.iterations:
            reporter.say(f" the run is complete: iteration {progress.iteration} of {schedule.iterations}")
        saver = Saver(engine, config, tokenizer, reporter, store, progress, lease)
        stops = StopConditions(config.training, engine, signals, lease)
        trainer = Trainer(
            engine,
            splits,
            config,
            schedule,
            throughput,
            reporter,
            saver,
            progress,
            stops,
            activity,
            _text_writer(engine, config),
        )
        stop = trainer.run()
        activity.now("closing logs", patient=True)
    return Ending(trainer.progress.iteration, stop, reporter.lost_sinks)


def _in_its_order(
    splits: Splits,
    progress: Progress,
    config: Config,
    schedule: RunSchedule,
    tokenizer: dict[str, Any],
    lines: list[str],
) -> tuple[Splits, Progress]:
    """The training samples in Megatron-LM's order for as many as `progress` says.

    `splits` were opened for as many as the flags ask for, before a checkpoint was read. `lines` for the log
    get one for each order that has to be built.
    """
    requested = schedule.requested_samples(config.training, config.evaluation)["train"]
    if progress.ordered_samples in (None, requested):
        return splits, replace(progress, ordered_samples=requested)
    samples = progress.ordered_samples
    reopened = open_data(
        config, schedule, tokenizer, lambda line: lines.append(f" {line}"), train_samples=samples
    )
    return replace(splits, train=reopened.train), progress


def _text_writer(engine: ZeroEngine, config: Config) -> Callable[[], str] | None:
    """--sample-prompt."""
    if config.evaluation.sample_prompt is None:
        return None
    return partial(
        sample_text,
        engine,
        build_tokenizer(config.tokenizer),
        config.evaluation.sample_prompt,
        new_tokens=config.evaluation.sample_tokens,
        positions=config.model.max_position_embeddings,
    )


def _plan_lines(
    engine: ZeroEngine, config: Config, tokenizer: dict[str, Any], schedule: RunSchedule
) -> list[str]:
    """The memory that each GPU will hold, and advice to accumulate gradients inside nodes where that pays.

    The memory of a CPU is not planned, and taken to be enough.
    """
    if engine.topology.rank != 0:
        return []
    job = job_of(config, tokenizer["vocab_size"], schedule, engine.topology)
    zero = replace(job.zero, zero_copy_engines="on" if engine.copy_engines else "off")  # what auto came to
    job, lines, total = replace(job, zero=zero), [], math.inf
    if engine.device.type == "cuda":
        total = torch.cuda.get_device_properties(engine.device).total_memory
        memory = memory_of(job)
        sizes = (memory.resident, memory.peak, total)
        states, peak, there = (f"{size / 2**30:.2f} GiB" for size in sizes)
        lines.append(f" memory planned: {states} of states and buffers, {peak} {memory.moment}, of {there}")
    if advice := accumulation_advice(job, total / 2**30):
        lines.append(f" advice: {advice}")
    return lines


def _head(
    engine: ZeroEngine, splits: Splits, config: Config, tokenizer: dict[str, Any], dtype: str
) -> list[str]:
    """What a reader of the log has to know to repeat the run."""
    model, topology = config.model, engine.topology
    parameters = parameter_count(model, tokenizer["vocab_size"])
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
    lines = [
        f" torch {torch.__version__}, python {platform.python_version()}, {topology.world_size} × {name}, "
        f"{dtype}{' with 8-bit products' if config.precision.fp8 else ''}, {config.zero.describe()}"
        f"{', compiled layers' if engine.model.compiled else ''}",
        f" GPT of {parameters / 1e6:.1f} M parameters: {model.num_layers} layers × {model.hidden_size}, "
        f"{model.num_attention_heads} heads, sequence {model.seq_length}, vocabulary "
        f"{tokenizer['vocab_size']} padded to {model.padded_vocab_size(tokenizer['vocab_size'])}",
    ]
    if attention := engine.model.parts.attention.describe():
        lines.append(f" attention: {attention}")
    for split in ("train", "valid", "test"):
        samples = getattr(splits, split)
        if samples is not None:
            lines.append(f" {split}: {samples.describe()}")
    return lines
