"""Tensor ranks × data ranks × ZeRO stages learn what one process does (1909.08053, 2205.05198)."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import pytest
import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.zero.engines import engine_of, states_of, weights_of
from tests.zero.ranks import on_ranks

VOCAB, STEPS, SAMPLES = 250, 20, 4
GPT_2 = ModelConfig(
    num_layers=3,
    hidden_size=36,
    num_attention_heads=4,
    ffn_hidden_size=52,
    seq_length=12,
    hidden_dropout=0,
    attention_dropout=0,
)
LLAMA = replace(
    GPT_2,
    group_query_attention=True,
    num_query_groups=4,
    num_attention_heads=8,
    kv_channels=10,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    qk_layernorm=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
MODELS = {"gpt2": GPT_2, "llama": LLAMA}
RECOMPUTE = {
    "stored": RecomputeConfig(),
    "selective": RecomputeConfig(recompute_activations=True),
    "full": RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
}


@dataclass(frozen=True)
class Case:
    """One run of STEPS steps on SAMPLES samples."""

    model: str = "gpt2"
    tensor: int = 1
    stage: int = 0
    recompute: str = "stored"
    accumulate: int = 1


def build(case: Case, topology: Topology) -> ZeroEngine:
    return engine_of(
        MODELS[case.model],
        VOCAB,
        zero=ZeroConfig(zero_stage=case.stage),
        recompute=RECOMPUTE[case.recompute],
        precision=PrecisionConfig(fp32=True),
        topology=topology,
        tensor=case.tensor,
    )


@dataclass(frozen=True)
class Trained:
    """Losses of all steps and of an evaluation, and norms of the first gradient and of the last."""

    losses: list[float]
    norms: tuple[float, float]
    gradient: dict[str, list[float]]  # the first step's, by parameter; on rank 0


def train(topology: Topology, cases: tuple[Case, ...]) -> list[Trained]:
    torch.set_num_threads(1)
    return [_train(build(case, topology), case) for case in cases]


def _train(engine: ZeroEngine, case: Case) -> Trained:
    data = torch.randint(VOCAB, (STEPS, SAMPLES, 13), generator=torch.Generator().manual_seed(8))
    mine = slice(engine.grid.data.rank, None, engine.grid.data.world_size)
    losses, norms, gradient = [], [], {}
    for step, samples in enumerate(data):
        micro_batches = samples[mine].chunk(case.accumulate)
        total = torch.zeros(())
        for index, batch in enumerate(micro_batches):
            total += engine.accumulate(batch, index=index, micro_batches=len(micro_batches))
        norms.append(engine.step(1e-3).grad_norm.item())
        losses.append(engine.mean_over_ranks(total / len(micro_batches)).item())
        if step == 0:  # (1 - beta1) times the clipped gradient
            first = states_of(engine, "exp_avg")
            gradient = {name: state.flatten().tolist() for name, state in first.items()}
    losses.append(engine.evaluate(data[0]).item())
    weights_of(engine)  # asserts that replicated parameters have the same bits on all tensor ranks
    engine.close()
    return Trained(losses, (norms[0], norms[-1]), gradient if engine.topology.rank == 0 else {})


@cache
def one_process(model: str) -> Trained:
    return train(Topology(), (Case(model),))[0]


def check(case: Case, found: Trained, *, rel: float) -> None:
    """Losses, norms and the first gradient, which is compared by its norm as a whole."""
    expected = one_process(case.model)
    assert found.losses == pytest.approx(expected.losses, rel=rel), case
    assert found.norms == pytest.approx(expected.norms, rel=10 * rel), case
    ours, theirs = (torch.tensor([*chain(*each.gradient.values())]) for each in (found, expected))
    assert found.gradient.keys() == expected.gradient.keys()
    assert torch.linalg.norm(ours - theirs) <= rel * torch.linalg.norm(theirs), case


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (4, 1), (2, 2)])
def test_every_stage_learns_what_one_process_does(tensor: int, data: int) -> None:
    """Within what the order of fp32 sums leaves after 20 steps."""
    cases = tuple(Case(model, tensor, stage) for model in MODELS for stage in range(4))
    first, *others = on_ranks(tensor * data, train, cases)
    for other in others:
        assert [(each.losses, each.norms) for each in other] == [(each.losses, each.norms) for each in first]
    for case, found in zip(cases, first, strict=True):
        check(case, found, rel=1e-6)


def test_recomputation_and_accumulation_change_nothing() -> None:
    cases = tuple(
        Case(model, 2, stage, recompute, accumulate)
        for model in MODELS
        for stage, recompute, accumulate in (
            (0, "full", 2),
            (2, "selective", 2),
            (3, "full", 1),
            (3, "full", 2),
        )
    )
    for case, found in zip(cases, on_ranks(4, train, cases)[0], strict=True):
        check(case, found, rel=1e-6)
