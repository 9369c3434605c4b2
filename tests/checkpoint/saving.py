"""Saves and loads engines around a small GPT as a run does, on one rank or inside of `on_ranks`."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.faults import engines
from benchmarks.faults.engines import FLAGS
from megatron_zpp.checkpoint.manifest import read_manifest, write_manifest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.same_model import TABLES
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.root import parse_args
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import checksums_of
from megatron_zpp.storage.location import Location
from megatron_zpp.train.resume import restore
from megatron_zpp.train.resume.start import Start
from megatron_zpp.train.schedule.run_schedule import RunSchedule
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import REFERENCE
from tests.support import flipped
from tests.zero.engines import engine_of, operations, states_of

FIRST, SECOND, TOKENIZER = Progress(5, 50), Progress(10, 100), engines.TOKENIZER


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


def digests(engine: ZeroEngine) -> dict[str, str]:
    """Hashes by kind and name of the whole states, of tables without the rows of padding.

    Fails if tensor ranks have copies that differ, or if padding is not zero: but of references, since codes
    of weight differences have no zero.
    """
    found = {}
    for kind in engine.states.kinds:
        for name, state in states_of(engine, kind).items():
            if name in TABLES:
                entries = engine.model.vocab_size
                padded = kind != REFERENCE and state[entries:].any()
                assert not padded, f"{kind} of {name} is zero in padding"
                state = state[:entries]
            found[f"{kind}/{name}"] = digest(state)
    return found


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def restored(engine: ZeroEngine, *flags: str) -> Start:
    """Where a run with these flags starts, whose engine is a `small` one; on each of its ranks."""
    config, store = parse_args([*FLAGS, *flags]), dist.distributed_c10d._get_default_store()
    ranks, length = engine.topology.world_size, config.model.seq_length
    schedule = RunSchedule.from_config(config.training, config.learning_rate, ranks, seq_length=length)
    return restore.restore(config, engine, TOKENIZER, store, schedule)


def flip(file: Path, bit: int = -16) -> None:
    """Change one bit of a file."""
    file.write_bytes(flipped(file.read_bytes(), bit))


def seal(path: Path, name: str, content: str) -> None:
    """Give a file of a checkpoint another content, and the manifest the digests of that."""
    (path / name).write_text(content)
    write_manifest(path, read_manifest(path) | {name: checksums_of(path / name)})


def save(directory: Location, engine: ZeroEngine, progress: Progress = FIRST, **options: Any) -> Any:
    """A checkpoint of `progress`, with a configuration that is not ASCII."""
    return engines.save(directory, engine, progress, **{"config": {"note": "π"}} | options)
