"""Every stage, world size, accumulation and recomputation against one process that keeps everything."""

import dataclasses
import itertools
from functools import cache

import pytest
import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.run import ZeroConfig
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.topology import Topology
from tests.zero.engines import engine_of
from tests.zero.ranks import on_ranks

VOCAB, STEPS = 101, 4
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=36,  # nothing divides: not by ranks, not by blocks, not by the alignment
    num_attention_heads=3,
    seq_length=10,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
RECOMPUTE = {
    "stored": RecomputeConfig(),
    "selective": RecomputeConfig(recompute_activations=True),
    "full": RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
    "chunks": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3
    ),
}
STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run."""

    stage: int = 0
    accumulation: int = 1
    recompute: str = "stored"
    prefetch: int = 1
    untied: bool = False
    precision: PrecisionConfig = PrecisionConfig()


def build(case: Case, topology: Topology) -> ZeroEngine:
    return engine_of(
        dataclasses.replace(MODEL, untie_embeddings_and_output_weights=case.untied),
        VOCAB,
        zero=ZeroConfig(zero_stage=case.stage, zero_prefetch_units=case.prefetch),
        precision=case.precision,
        recompute=RECOMPUTE[case.recompute],
        topology=topology,
    )


def train(topology: Topology, cases: tuple[Case, ...]) -> list[list[float]]:
    """The mean loss of every step, then the loss of an evaluation, for each case."""
    torch.set_num_threads(1)
    return [_train(build(case, topology), case) for case in cases]


def _train(engine: ZeroEngine, case: Case) -> list[float]:
    ranks, rank = engine.topology.world_size, engine.topology.rank
    data = torch.randint(
        VOCAB, (STEPS, case.accumulation, ranks, 2, 11), generator=torch.Generator().manual_seed(8)
    )
    losses = []
    for step, micro_batches in enumerate(data):
        total = torch.zeros(())
        for index, tokens in enumerate(micro_batches):
            torch.manual_seed(1000 * step + index * ranks + rank)
            total += engine.accumulate(tokens[rank], index=index, micro_batches=case.accumulation)
        engine.step(1e-2)
        losses.append(engine.mean_over_ranks(total / case.accumulation).item())
    losses.append(engine.evaluate(data[0, 0, 0]).item())
    return losses


@cache
def one_process(micro_batches: int, untied: bool = False) -> list[float]:
    """The same batches on one process at stage 0."""
    return train(Topology(), (Case(accumulation=micro_batches, untied=untied),))[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_losses_equal_one_process(world: int) -> None:
    cases = tuple(
        Case(stage, accumulation, recompute)
        for stage, accumulation, recompute in itertools.product(STAGES, (1, 3), RECOMPUTE)
    )
    results = on_ranks(world, train, cases)
    assert all(result == results[0] for result in results[1:])  # every rank sees the same
    for case, losses in zip(cases, results[0], strict=True):
        expected = one_process(world * case.accumulation)
        if world == 1 or case.accumulation == 1 or case.stage >= 2:  # the sum is in the same order
            assert losses[-1] == expected[-1], case
        assert losses == pytest.approx(expected, rel=1e-6), case
