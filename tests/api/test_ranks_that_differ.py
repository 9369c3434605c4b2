"""Ranks whose buffers, order of gradients or micro-batches differ are told so, and take no step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp import Topology
from tests.api.models import engine_of, steps_of
from tests.api.test_states import same
from tests.support import refusal
from tests.zero.own_modules import WIDTH, Layer, Stack, batch_of, stack_of
from tests.zero.ranks import on_ranks


class Drifts(Layer):
    """Changes a buffer from its second forward on so that torch counts no change, as codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(WIDTH))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards > 2:
            self.code.data.add_(x.detach().mean(0))
        return super().forward(x)


class Calibrates(Drifts):
    """Has averages of what it sees in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.code.copy_(x.mean(0))
        return Layer.forward(self, x)


def drift(topology: Topology) -> list[str]:
    engines = [engine_of(stack_of(each)(), topology.mesh()) for each in (Drifts, Calibrates)]
    return [
        refusal(steps_of, engines[0], error=RuntimeError),
        refusal(engines[1].evaluate, batch_of(0, topology.rank), error=RuntimeError),
    ]


def test_buffers_that_become_different_ones_on_each_rank_are_refused() -> None:
    said = on_ranks(2, drift)
    assert said[0] == said[1]
    assert said[0][0].startswith("layers.0.code: a buffer that the 2 ranks hold different values of; ")
    assert said[0][1].startswith("layers.0.code: a buffer that the forward changes, so that the 2 ranks ")


class Chooses(Layer):
    """Reads a parameter where its batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.other = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.tanh(self.other(x + self.shift)) if x[0, 0] > 0 else x


class ChoosesAlike(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        chosen = super().forward(x)
        return chosen + 0 * (self.shift.sum() + self.other.weight.sum() + self.other.bias.sum())


def choose(topology: Topology, stage: int, alike: bool) -> list[str]:
    """What is said of two steps, in which the ranks take turns in reading all parameters."""
    torch.manual_seed(0)
    engine = engine_of(stack_of(ChoosesAlike if alike else Chooses)(), topology.mesh(), zero_stage=stage)
    before, said = engine.state_dict(), []
    for step in range(2):
        x, y = batch_of(step, topology.rank)
        x[0, 0] = 50.0 if (topology.rank + step) % 2 else -50.0
        engine.accumulate((x, y))
        try:
            engine.step(1e-2)
        except RuntimeError as error:
            said.append(str(error))
    after = engine.state_dict()
    weights = (state.get("model", {}) for state in (before, after))  # steps are counted
    assert same(*weights) is (bool(said) or topology.rank > 0)
    engine.close()
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_units_whose_gradients_ranks_make_in_different_orders_are_refused(stage: int) -> None:
    """They would be added to those of other units. No rank takes the step."""
    assert on_ranks(2, choose, stage, True) == [[], []]
    for said in on_ranks(2, choose, stage, False):
        assert len(said) == 2
        assert all(each.startswith("step: is skipped, because ranks have read units or") for each in said)


class Routes(Stack):
    """Each rank reads a layer of its own, whose gradients no rank makes."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Layer() for _ in range(2)).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, route: Tensor | None = None) -> Tensor:
        return super().forward(x if route is None else self.others[int(route)](x), y)

    def units(self) -> list[tuple[str, nn.Module]]:
        return [*((f"others.{number}", each) for number, each in enumerate(self.others)), *super().units()]


def differ(topology: Topology) -> list[str]:
    """What is said where ranks differ in what they read, evaluate, count and weigh."""
    rank, said = topology.rank, []
    route = torch.tensor(rank)
    for stage, kind in [
        (3, "reads"),
        (1, "reads"),
        (3, "evaluates"),
        (0, "counts"),
        (1, "counts"),
        (0, "weighs"),
    ]:
        torch.manual_seed(0)
        alone: dict[str, Any] = {"zero_prefetch_units": 0} if stage == 3 else {}  # else ranks would wait
        engine = engine_of(Routes(), topology.mesh(), zero_stage=stage, **alone)
        before = engine.state_dict().get("model", {})
        if kind == "evaluates":
            engine.evaluate((*batch_of(0, rank), route))
        for index in range(count := 1 + rank if kind == "counts" else 1):
            batch = (*batch_of(index, rank), route if kind == "reads" else None)
            weight = 1.0 if kind == "weighs" and rank else None
            engine.accumulate(batch, index=index, micro_batches=count, weight=weight)
        said.append(refusal(engine.step, 1e-2, error=RuntimeError))
        assert same(engine.state_dict().get("model", {}), before)
        engine.close()
    return said


def test_ranks_that_would_mix_weights_or_divide_by_other_numbers_are_refused() -> None:
    """Gathers of different units would make other weights of both; those of frozen units too."""
    for said in on_ranks(2, differ):
        assert all(each.startswith("step: is skipped, because ranks have read units or") for each in said), (
            said
        )
