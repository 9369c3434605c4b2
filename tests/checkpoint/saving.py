"""Saves and loads engines around a small GPT as a run does, on one rank or inside of `on_ranks`."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.directory import checkpoint_path
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read_back import read_back
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.checkpoint.write import SaveOptions, write_checkpoint
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.null import NullTokenizer
from megatron_zpp.zero.engine import ZeroEngine
from tests.zero.engines import engine_of
from tests.zero.quantizing import operations

TOKENIZER = describe(NullTokenizer(49))
FIRST, SECOND = Progress(5, 50), Progress(10, 100)


def small(
    hidden: int = 32,
    seed: int = 1,
    precision: PrecisionConfig | None = None,
    topology: Topology | None = None,
    tensor: int = 1,
    **zero: object,
) -> ZeroEngine:
    """An engine; its units have sizes that no shard divides evenly. `tensor` ranks share its layers."""
    config = ModelConfig(num_layers=2, hidden_size=hidden, num_attention_heads=4, seq_length=8)
    return engine_of(
        config,
        50,
        seed=seed,
        precision=precision,
        topology=topology,
        zero=ZeroConfig(**zero) if zero else None,
        operations=operations() if zero.get("zero_quantized_weights") else None,
        tensor=tensor,
    )


def train(engine: ZeroEngine, steps: int, seed: int) -> list[float]:
    """Gradient norms of some steps, on the same samples on every rank."""
    generator = torch.Generator().manual_seed(seed)
    norms = []
    for _ in range(steps):
        torch.manual_seed(seed)
        engine.accumulate(torch.randint(50, (2, 9), generator=generator), index=0, micro_batches=1)
        norms.append(engine.step(1e-2).grad_norm.item())
    return norms


def save(
    directory: Path,
    engine: ZeroEngine,
    progress: Progress = FIRST,
    *,
    with_optimizer: bool = True,
    reads_back: bool = False,
    config: dict[str, Any] | None = None,
    timeout: timedelta = timedelta(seconds=60),
    files: FileWorker | None = None,
    may_write: Callable[[], None] = lambda: None,
) -> Path:
    """A checkpoint of `progress`."""
    path = checkpoint_path(directory, progress.iteration)
    ranks = engine.topology.world_size
    store = dist.HashStore() if ranks == 1 else dist.distributed_c10d._get_default_store()
    options = SaveOptions(may_write=may_write, files=files or FileWorker())
    path, checksums = write_checkpoint(
        path,
        shards_of(engine, with_optimizer=with_optimizer),
        describe_state(
            engine,
            progress,
            with_optimizer=with_optimizer,
            config=config or {"note": "π"},
            tokenizer=TOKENIZER,
        ),
        Exchange(store, engine.topology, timeout, f"test/{path}"),
        options,
    )
    if reads_back:
        read_back(path, checksums, Exchange(store, engine.topology, timeout, f"read back/{path}"), options)
    return path
