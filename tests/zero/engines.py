"""Engines around a small GPT, the same one in every test of the engine."""

from collections.abc import Collection
from typing import Literal

import torch
import torch.distributed as dist

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import AttentionKernel, DotProduct
from megatron_zpp.model.gpt import GPT, ModelComponents, norm_classes
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.engine import ZeroEngine


def engine_of(
    config: ModelConfig,
    vocab_size: int,
    *,
    zero: ZeroConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    precision: PrecisionConfig | None = None,
    recompute: RecomputeConfig | None = None,
    topology: Topology | None = None,
    device: str = "cpu",
    operations: Operations | None = None,
    seed: int = 3,
    kernel: AttentionKernel | None = None,
    fused_backend: Literal["apex", "torch"] = "torch",
    decoupled: Collection[str] = (),
) -> ZeroEngine:
    """An engine with the initial weights of `seed`, drawn on the CPU whatever the device."""
    with torch.device("meta"):
        parts = ModelComponents(norm_classes(fused_backend), attention=kernel or DotProduct())
        model = GPT(config, vocab_size, recompute, parts)

    def initialize(name: str, tensor: torch.Tensor) -> None:
        drawn = torch.empty(tensor.shape)
        model.initialize_parameter(name, drawn, seed)
        tensor.copy_(drawn)

    return ZeroEngine(
        model,
        initialize,
        zero=zero or ZeroConfig(),
        optimizer=optimizer or OptimizerConfig(weight_decay=0.1),
        precision=precision or PrecisionConfig(),
        topology=topology or Topology(),
        device=torch.device(device),
        operations=operations,
        fused_backend=fused_backend,
        decoupled=decoupled,
    )


def states_of(engine: ZeroEngine, kind: str) -> dict[str, torch.Tensor]:
    """A copy of the whole weights, or of a moment, by name. Every rank must call it."""
    ranks, states = engine.topology.world_size, {}
    for unit, shard in zip(engine.units, engine.shards(kind), strict=True):
        shards = [torch.empty_like(shard, device=engine.device) for _ in range(ranks)]
        if ranks > 1:
            dist.all_gather(shards, shard.to(engine.device))
        else:
            shards = [shard]
        shards = [shards[engine.topology.owner_of(index)] for index in range(ranks)]
        states |= dict(zip(unit.names, unit.views(torch.cat(shards).clone()), strict=True))
    return states


def weights_of(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """A copy of the whole master weights by name."""
    return states_of(engine, "weights")
