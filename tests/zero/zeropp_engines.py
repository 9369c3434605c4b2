"""Engines of stage 3 with full recomputation, on which the tests of ZeRO++ try their settings."""

from collections.abc import Collection
from typing import Any

import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.zero.engines import engine_of, model_of, operations, this_device

VOCAB = 101
MODEL = model_of(num_layers=4, seq_length=10)
BF16 = PrecisionConfig(bf16=True)
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
HPZ, AUTO = {"zero_hpz_partition_size": "auto"}, {"zero_gradient_partition_size": "auto"}
ALL = QWZ | QGZ | HPZ
DELTA4 = QWZ | HPZ | {"zero_quantized_weights_format": "delta4"}
FOUR_BITS = DELTA4 | QGZ | {"zero_quantized_gradients_format": "rotated4"}


def build(
    topology: Topology,
    zero: dict[str, Any],
    precision: PrecisionConfig = BF16,
    model: ModelConfig = MODEL,
    inside_nodes: Collection[str] = (),
) -> ZeroEngine:
    """An engine with the settings `zero`, at stage 3 unless they name another one."""
    return engine_of(
        model,
        VOCAB,
        zero=ZeroConfig(**({"zero_stage": 3} | zero)),
        precision=precision,
        recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
        topology=topology,
        device=str(this_device()),
        operations=operations(),
        inside_nodes=inside_nodes,
    )


def batch(topology: Topology, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + topology.rank)
    return torch.randint(VOCAB, (2, 11), generator=generator)
