"""Builds the engine, puts it together with its data and its schedule, and trains."""

import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.exchange import Exchange
from megatron_zpp.config.root import Config
from megatron_zpp.data.open import Splits
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.gpt import GPT, norm_class
from megatron_zpp.train.activity import Activity
from megatron_zpp.train.device import Device
from megatron_zpp.train.loop import Trainer
from megatron_zpp.train.metrics import Throughput
from megatron_zpp.train.reporter import Reporter
from megatron_zpp.train.restore import restore
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.saver import Saver
from megatron_zpp.train.signals import StopSignals
from megatron_zpp.train.stopping import Stop, StopConditions
from megatron_zpp.train.verify import verify_data
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.topology import Topology


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
    """The model with its initial weights, sharded over the ranks that have joined."""
    with torch.device("meta"):
        model = GPT(config.model, tokenizer["vocab_size"], config.recompute, norm_class(device.fused_backend))
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
) -> Ending:
    """Goes on from --load, or begins, and trains to the end; `tokenizer` describes the one of the data.

    `store` is what all ranks share beside their collectives. A signal ends the run sooner; `activity` is told
    what is being done.
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
    lines = []
    if config.data.verify_data:
        activity.now("verifying data", patient=True)
        exchange = Exchange(store, engine.topology, config.distributed.timeout, "verify-data")
        lines.append(verify_data(splits, exchange))
    activity.now("loading", patient=True)
    progress, start_lines = restore(config, engine, tokenizer, store)
    reporter = Reporter(
        config.logging,
        config.to_json(),
        engine.topology,
        iterations=schedule.iterations,
        done=progress.iteration,
    )
    with reporter:
        for line in (*_head(engine, splits, config, tokenizer, dtype), *lines, *start_lines):
            reporter.say(line)
        if progress.iteration >= schedule.iterations:
            reporter.say(f" the run is complete: iteration {progress.iteration} of {schedule.iterations}")
        saver = Saver(engine, config, tokenizer, reporter, store, progress)
        stops = StopConditions(config.training, engine, signals)
        trainer = Trainer(
            engine, splits, config, schedule, throughput, reporter, saver, progress, stops, activity
        )
        stop = trainer.run()
        activity.now("closing logs", patient=True)
    return Ending(trainer.progress.iteration, stop, reporter.lost_sinks)


def _head(
    engine: ZeroEngine, splits: Splits, config: Config, tokenizer: dict[str, Any], dtype: str
) -> list[str]:
    """What a reader of the log has to know to repeat the run."""
    model, topology = config.model, engine.topology
    parameters = parameter_count(model, tokenizer["vocab_size"])
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
    lines = [
        f" torch {torch.__version__}, python {platform.python_version()}, {topology.world_size} × {name}, "
        f"{dtype}, {config.zero.describe()}",
        f" GPT of {parameters / 1e6:.1f} M parameters: {model.num_layers} layers × {model.hidden_size}, "
        f"{model.num_attention_heads} heads, sequence {model.seq_length}, vocabulary "
        f"{tokenizer['vocab_size']} padded to {model.padded_vocab_size(tokenizer['vocab_size'])}",
    ]
    for split in ("train", "valid", "test"):
        samples = getattr(splits, split)
        if samples is not None:
            lines.append(f" {split}: {samples.describe()}")
    return lines
