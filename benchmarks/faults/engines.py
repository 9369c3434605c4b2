"""Engines around a small GPT on one rank, and their checkpoints: what campaigns save and load."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.directory import checkpoint_name
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.checkpoint.together import read_back
from megatron_zpp.checkpoint.write import write_checkpoint
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.library import load_operations
from megatron_zpp.storage.location import AnyLocation, Location
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.null import NullTokenizer
from megatron_zpp.zero.engine import ZeroEngine

TOKENIZER = describe(NullTokenizer(49))
FLAGS = (  # of a run that has a `small` engine
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 8 --micro-batch-size 2 --train-iters 9 --lr 1 --eval-iters 0"
).split()


def small(seed: int = 1, precision: PrecisionConfig | None = None, **zero: Any) -> ZeroEngine:
    """An engine; its units have sizes that blocks do not divide evenly."""
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=8)
    with torch.device("meta"):
        model = GPT(config, 50)

    def initialize(name: str, tensor: torch.Tensor) -> None:
        model.initialize_parameter(name, tensor, seed)

    quantized = "zero_quantized_weights" in zero
    return ZeroEngine(
        model,
        Mesh(),
        EngineConfig(
            zero=ZeroConfig(**zero),
            optimizer=OptimizerConfig(weight_decay=0.1),
            precision=precision or PrecisionConfig(),
        ),
        initialize=initialize,
        device=torch.device("cpu"),
        operations=load_operations("cpu", require_kernels=False, say=print) if quantized else None,
        fused_backend="torch",
    )


def train(engine: ZeroEngine, seed: int) -> None:
    """A step on samples that follow from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    engine.accumulate(torch.randint(50, (2, 9), generator=generator), index=0, micro_batches=1)
    engine.step(1e-2)


def save(
    directory: AnyLocation,
    engine: ZeroEngine,
    progress: Progress,
    *,
    with_optimizer: bool = True,
    reads_back: bool = False,
    config: dict[str, Any] | None = None,
    timeout: timedelta = timedelta(seconds=60),
    files: FileWorker | None = None,
    may_write: Callable[[], None] = lambda: None,
) -> Location:
    """A checkpoint of `progress`, of all ranks."""
    path = directory / checkpoint_name(progress.iteration)
    ranks = engine.topology.world_size
    store = dist.HashStore() if ranks == 1 else dist.distributed_c10d._get_default_store()
    files = files or FileWorker()
    state = describe_state(
        engine, progress, with_optimizer=with_optimizer, config=config or {}, tokenizer=TOKENIZER
    )
    shards = shards_of(engine, with_optimizer=with_optimizer)
    exchange = Exchange(store, engine.topology, timeout, f"save/{path}")
    written, digest = write_checkpoint(path, shards, state, exchange, files, may_write=may_write)
    if reads_back:
        read_back(written, digest, Exchange(store, engine.topology, timeout, f"read back/{path}"), files)
    return written


def states(engine: ZeroEngine) -> list[bytes]:
    """Weights and moments of an engine of one rank."""
    kinds = engine.states.kinds
    return [shard.numpy().tobytes() for kind in kinds for shard in engine.states.shards(kind)]
