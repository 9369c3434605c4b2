"""Memory and traffic: what the engine really holds and sends, against the closed forms."""

from collections import deque
from collections.abc import Iterator

import pytest
import torch

from benchmarks.memory_table import model_state_bytes
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.read_guard import Unreadable
from tests.support import nightly
from tests.zero.closed_forms import arena_bytes
from tests.zero.engines import engine_of
from tests.zero.ranks import on_ranks

VOCAB = 512
MODEL = ModelConfig(
    num_layers=6, hidden_size=128, num_attention_heads=4, seq_length=16, hidden_dropout=0, attention_dropout=0
)
BF16 = PrecisionConfig(bf16=True)


def build(topology: Topology, stage: int, prefetch: int = 1, precision: PrecisionConfig = BF16) -> ZeroEngine:
    torch.set_num_threads(1)
    zero = ZeroConfig(zero_stage=stage, zero_prefetch_units=prefetch if stage == 3 else None)
    return engine_of(
        MODEL,
        VOCAB,
        zero=zero,
        precision=precision,
        topology=topology,
        recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
    )


def accumulate(engine: ZeroEngine, index: int, micro_batches: int) -> None:
    engine.accumulate(torch.zeros(1, 17, dtype=torch.long), index=index, micro_batches=micro_batches)


def step(engine: ZeroEngine, accumulation: int) -> None:
    for index in range(accumulation):
        accumulate(engine, index, accumulation)
    engine.step(1e-3)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_formula_gives_the_zero_papers_figures(stage: int, gigabytes: float) -> None:
    """Figure 1: 7.5 billion parameters on 64 GPUs, gradients in fp16."""
    assert model_state_bytes(7_500_000_000, 64, stage, gradient_bytes=2) / 1e9 == pytest.approx(
        gigabytes, abs=0.05
    )


def live_bytes(engine: ZeroEngine) -> int:
    """Of every storage that the engine reaches, counted once. It takes the traffic of the ledger."""
    engine.take_traffic()  # waits for the communication threads, which change what is visited
    storages = {}

    def visit(thing: object, seen: set[int]) -> None:
        if id(thing) in seen or isinstance(thing, (type, str, int, float, Unreadable)):
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            if thing.grad is not None:
                visit(thing.grad, seen)
        for part in parts(thing):
            visit(part, seen)

    visit(engine, set())
    return sum(storages.values())


def parts(thing: object) -> Iterator[object]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, (list, tuple, set, deque)):
        yield from thing
    elif hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def measure_memory(
    topology: Topology, cases: list[tuple[int, int]]
) -> list[tuple[list[int], list[int], float]]:
    """(live bytes after each micro-batch, after each step, theory) for each stage and prefetch."""
    measured = []
    for stage, prefetch in cases:
        engine = build(topology, stage, prefetch)
        inside, between = [], []
        for micro_batches in (1, 3, 1):
            for index in range(micro_batches):
                accumulate(engine, index, micro_batches)
                inside.append(live_bytes(engine))
            engine.step(1e-3)
            between.append(live_bytes(engine))
        parameters = sum(parameter.numel() for parameter in engine.model.parameters())
        arena = arena_bytes(
            [unit.layout for unit in engine.units],
            stage,
            prefetch=prefetch,
            reduce_bytes=2 if stage >= 2 else 4,
            nodes=topology.nodes,
        )
        states = model_state_bytes(parameters, topology.world_size, stage)
        measured.append((inside, between, states + arena))
    return measured


@pytest.mark.parametrize(("nodes", "local"), [nightly(1, 1), nightly(1, 2), (2, 2)])
def test_a_rank_holds_what_theory_says(nodes: int, local: int) -> None:
    """On 2 × 2 ranks stages 0 and 1 reduce fp32 gradients in two hops."""
    cases = [(0, 1), (1, 1), (2, 1), (3, 0), (3, 2)]
    for measured in on_ranks(nodes * local, measure_memory, cases, ranks_per_node=local):
        for case, (inside, between, theory) in zip(cases, measured, strict=True):
            assert max(inside) <= 1.02 * theory, case
            assert len(set(between)) == 1, case
            assert between[0] < min(inside), case  # gradients are gone between steps


def volumes(topology: Topology, stage: int) -> tuple[int, int, int]:
    """(bytes inside the node, bytes between nodes) of one step in bf16, and the elements of the model."""
    engine = build(
        topology, stage, prefetch=0, precision=PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)
    )
    step(engine, 1)
    engine.take_traffic()
    step(engine, 1)
    return *engine.take_traffic(), sum(unit.layout.numel for unit in engine.units)


@pytest.mark.parametrize(("stage", "volume"), [nightly(1, 2), (3, 3)])
def test_volume_is_two_or_three_models_by_link(stage: int, volume: int) -> None:
    """Rajbhandari et al., section 7: 2 Psi a step up to stage 2, 3 Psi at stage 3, times (d - 1) / d.

    At stage 3 a little less: the embedding, the head and the last layer are not gathered twice. On 2 × 2
    ranks both a gather and a reduction in two hops take one of the three shards that each rank sends to
    another node.
    """
    per_rank = on_ranks(4, volumes, stage, ranks_per_node=2)
    intra, inter = (sum(rank[link] for rank in per_rank) for link in (0, 1))
    whole = 4 * 2 * per_rank[0][2] * 3 / 4  # bytes that all ranks send to move the model once
    assert 0.85 * volume * whole < intra + inter <= volume * whole
    assert inter == (intra + inter) / 3
