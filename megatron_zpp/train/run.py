"""Puts a built engine, its data and its schedule together and trains."""

import platform
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.exchange import Exchange
from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.root import Config
from megatron_zpp.data.open import Splits
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.train.loop import Trainer
from megatron_zpp.train.metrics import Throughput
from megatron_zpp.train.reporter import Reporter
from megatron_zpp.train.restore import restore
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.saver import Saver
from megatron_zpp.train.verify import verify_data
from megatron_zpp.zero.engine import ZeroEngine


def train(
    engine: ZeroEngine,
    splits: Splits,
    config: Config,
    schedule: RunSchedule,
    tokenizer: dict[str, Any],
    store: dist.Store,
) -> Progress:
    """Goes on from --load, or begins, and trains to the end; `tokenizer` describes the one of the data.

    `store` is what all ranks share beside their collectives.
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
        exchange = Exchange(store, engine.topology, config.distributed.timeout, "verify-data")
        lines.append(verify_data(splits, exchange))
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
        return Trainer(engine, splits, config, schedule, throughput, reporter, saver, progress).run()


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
