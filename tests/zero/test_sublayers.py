"""Units that are half a layer (--zero-unit sublayer): the numbers, bits and waits of whole layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.read import load_checkpoint
from megatron_zpp.checkpoint.states import Progress, formats_of_units
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.prefetch import WeightState
from tests.checkpoint.saving import TOKENIZER, save
from tests.zero.engines import engine_of, states_of, weights_of
from tests.zero.quantizing import operations
from tests.zero.ranks import on_ranks

VOCAB, STEPS, LAYERS = 101, 3, 4
MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=36,  # nothing divides: not by ranks, not by blocks, not by the alignment
    num_attention_heads=4,
    seq_length=10,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
RECOMPUTE = {
    "stored": RecomputeConfig(),
    "selective": RecomputeConfig(recompute_granularity="selective"),
    "full": FULL,
    "chunks": replace(FULL, recompute_num_layers=3),
}
FP32, BF16 = PrecisionConfig(), PrecisionConfig(bf16=True)
SUBLAYER: dict[str, Any] = {"zero_unit": "sublayer"}
ALL: dict[str, Any] = {
    "zero_stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": "auto",
    "zero_quantized_gradients": True,
}
DELTA4 = ALL | {"zero_quantized_weights_format": "delta4"}
HPZ = {"zero_stage": 3, "zero_hpz_partition_size": "auto"}


def build(
    topology: Topology,
    zero: dict[str, Any],
    recompute: str = "stored",
    precision: PrecisionConfig = FP32,
    clip_grad: float = 0.0,
    tensor: int = 1,
) -> ZeroEngine:
    settings = ZeroConfig(**zero)
    return engine_of(
        replace(MODEL, hidden_dropout=0.0, attention_dropout=0.0) if tensor > 1 else MODEL,
        VOCAB + tensor % 2,  # tensor ranks share it
        zero=settings,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=clip_grad),
        precision=precision,
        recompute=RECOMPUTE[recompute],
        topology=topology,
        operations=operations() if settings.quantizes else None,
        tensor=tensor,
    )


def train(engine: ZeroEngine, steps: range, micro_batches: int = 1) -> list[float]:
    """The mean loss of each step, then that of an evaluation."""
    rank, ranks = engine.grid.data.rank, engine.grid.data.world_size
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        data = torch.randint(VOCAB, (micro_batches, ranks, 2, MODEL.seq_length + 1), generator=generator)
        total = torch.zeros(())
        for index in range(micro_batches):
            torch.manual_seed(1000 * step + index * ranks + rank)
            total += engine.accumulate(data[index, rank], index=index, micro_batches=micro_batches)
        engine.step(1e-2)
        losses.append(engine.mean_over_ranks(total).item())
    return [*losses, engine.evaluate(data[0, 0]).item()]
