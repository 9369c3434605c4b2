"""A small model as users write it, and its training by ZeroEngine and by plain torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp import (
    EngineConfig,
    Mesh,
    OptimizerConfig,
    PrecisionConfig,
    ShardSegment,
    ZeroConfig,
    ZeroEngine,
)
from tests.zero.own_modules import WIDTH, batch_of

OPTIMIZER = OptimizerConfig(weight_decay=0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Vision(nn.Module):
    """Says nothing of units. Its own forward reads a parameter, and a weight that it shares with its head."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x.to(self.head.weight.dtype))
        x = x * self.scale.to(x.dtype) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        x = self.last(self.norm(x)) + F.linear(x, self.first.weight)
        return (self.head(x)[:, 0].float() - y).square().mean()


class Stateless:
    """Plain gradient descent, with a state of any name beside."""

    accepts_16bit_gradients = writes_gather_source = False

    def __init__(self, *names: str) -> None:
        self.state_names = names

    def scalars(self, steps: Tensor, rate: float, divisor: Tensor, found_inf: Tensor) -> tuple:
        return rate, divisor

    def step(self, shard: ShardSegment, gradient: Tensor, scalars: tuple) -> None:
        shard.master.sub_(scalars[0] / scalars[1] * gradient)


def engine_of(
    model: nn.Module,
    mesh: Mesh | None = None,
    *,
    initialize: Callable[[str, Tensor], None] | None = None,
    precision: PrecisionConfig | None = None,
    optimizer: Any = None,
    muon: bool = False,
    matrices: dict[str, tuple[int, ...]] | None = None,
    device: str = "cpu",
    **zero: Any,
) -> ZeroEngine:
    """In fp32, at stage 3."""
    config = EngineConfig(
        zero=ZeroConfig(**({"zero_stage": 3} | zero)),
        optimizer=replace(OPTIMIZER, optimizer="muon", muon_row_scaling_beta2=0.9) if muon else OPTIMIZER,
        precision=precision or PrecisionConfig(fp32=True),
    )
    rest: dict[str, Any] = {"say": lambda line: None, "device": torch.device(device), "matrices": matrices}
    return ZeroEngine(model, mesh or Mesh(), config, initialize=initialize, optimizer=optimizer, **rest)


def steps_of(engine: ZeroEngine, first: int = 0, steps: int = 3) -> list[float]:
    """The mean loss over ranks of each step, on two micro-batches."""
    losses = []
    for step in range(first, first + steps):
        found = [
            engine.accumulate(batch_of(step, 2 * engine.mesh.rank + index), index=index, micro_batches=2)
            for index in range(2)
        ]
        losses.append(engine.mean_over_ranks(torch.stack(found).mean()).item())
        engine.step(1e-2)
    return losses


def steps_of_torch(
    model: nn.Module, ranks: int, steps: int = 3, optimizer: Callable[..., Any] | None = None
) -> list[float]:
    """The same by torch, with AdamW unless `optimizer(groups, rate)` makes another one."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    adamw = lambda groups, rate: torch.optim.AdamW(groups, rate, eps=OPTIMIZER.adam_eps)  # noqa: E731
    made = (optimizer or adamw)(groups, 1e-2)
    losses = []
    for step in range(steps):
        made.zero_grad()
        loss = torch.stack([model(*batch_of(step, index)) for index in range(2 * ranks)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        made.step()
        losses.append(loss.item())
    return losses
