"""Saves of a rank on a GPU: copies beside the training hold the states of their step; all come back."""

from functools import partial
from pathlib import Path

import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.snapshot import Snapshot
from megatron_zpp.checkpoint.states import shards_of
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.zero.engines import engine_of

MODEL = ModelConfig(
    num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=64, hidden_dropout=0, attention_dropout=0
)


def build(seed: int = 1, *, offload: bool = False) -> ZeroEngine:
    zero = ZeroConfig(zero_stage=3, zero_offload_optimizer=offload)
    precision = PrecisionConfig(bf16=True)
    return engine_of(MODEL, 1000, zero=zero, precision=precision, device="cuda", seed=seed)


def train(engine: ZeroEngine, snapshot: Snapshot | None = None) -> None:
    torch.manual_seed(0)
    engine.accumulate(torch.randint(1000, (4, 65)).to("cuda"), index=0, micro_batches=1)
    if snapshot is not None:
        snapshot.settle()
    engine.step(1e-2)


def test_copies_hold_the_states_of_their_step_while_the_next_one_runs() -> None:
    for offload in (False, True):
        engine = build(offload=offload)
        train(engine)
        snapshot = Snapshot(shards_of(engine, with_optimizer=True))
        for _ in range(3):
            expected = {name: shard.clone() for name, shard in shards_of(engine, with_optimizer=True).items()}
            snapshot.take(partial(shards_of, engine, with_optimizer=True))
            train(engine, snapshot)
            train(engine)
            copies = snapshot.wait()
            assert all(torch.equal(copies[name], shard.cpu()) for name, shard in expected.items())


def test_a_gpu_resumes_from_what_a_gpu_saved(tmp_path: Path) -> None:
    engine = build()
    train(engine)
    path, other = save(tmp_path, engine), build(seed=9)
    load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
    train(engine)
    train(other)
    for kind in engine.states.kinds:
        assert all(map(torch.equal, engine.states.shards(kind), other.states.shards(kind)))
