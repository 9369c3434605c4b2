"""Every stage, world size, accumulation and recomputation against one process that keeps everything."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import CommStream, TrafficLedger
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero import build as build_module
from megatron_zpp.zero import gradients
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.prefetch import Phase
from megatron_zpp.zero.sharded_unit import GradientState, UnitGradient
from tests.support import nightly
from tests.zero.engines import engine_of, model_of, needed
from tests.zero.ranks import SharedMemoryStream, on_ranks

VOCAB = 101
MODEL = model_of(num_layers=4, seq_length=10, hidden_dropout=0.1, attention_dropout=0.1)
RECOMPUTE = {
    "stored": RecomputeConfig(),
    "selective": RecomputeConfig(recompute_activations=True),
    "full": RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
    "chunks": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3
    ),
    "mlps": RecomputeConfig(mlp_chunks_for_training=2),
}
STAGES = (0, 1, 2, 3)
FP32, BF16 = PrecisionConfig(), PrecisionConfig(bf16=True)
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**18, hysteresis=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run."""

    stage: int = 0
    accumulation: int = 1
    recompute: str = "stored"
    prefetch: int = 1
    untied: bool = False
    precision: PrecisionConfig = FP32
    hidden_size: int = MODEL.hidden_size
    groups: str = "off"  # of ranks inside which gradients accumulate
    steps: int = 2


def build(case: Case, topology: Topology) -> ZeroEngine:
    return engine_of(
        dataclasses.replace(
            MODEL, hidden_size=case.hidden_size, untie_embeddings_and_output_weights=case.untied
        ),
        VOCAB,
        zero=ZeroConfig(
            zero_stage=case.stage,
            zero_prefetch_units=case.prefetch if case.stage == 3 else None,
            zero_gradient_partition_size=case.groups,
        ),
        precision=case.precision,
        recompute=RECOMPUTE[case.recompute],
        topology=topology,
    )


def train(topology: Topology, cases: tuple[Case, ...]) -> list[list[float]]:
    """The mean loss of every step, then the loss of an evaluation, for each case."""
    return [_train(build(case, topology), case) for case in cases]


def _train(engine: ZeroEngine, case: Case) -> list[float]:
    ranks, rank = engine.topology.world_size, engine.topology.rank
    data = torch.randint(
        VOCAB, (case.steps, case.accumulation, ranks, 2, 11), generator=torch.Generator().manual_seed(8)
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


def one_process(case: Case, ranks: int) -> list[float]:
    """The batches of a case on one process at stage 0."""
    batches = ranks * case.accumulation
    alone = {"stage": 0, "accumulation": batches, "recompute": "stored", "prefetch": 1, "groups": "off"}
    return _one_process(dataclasses.replace(case, **alone))


@cache
def _one_process(case: Case) -> list[float]:
    return train(Topology(), (case,))[0]


def same_order(case: Case, world: int) -> bool:
    """Whether the gradients of one node are summed in the order in which one process accumulates them.

    Those of MLPs in chunks are sums over chunks on each rank.
    """
    return case.recompute != "mlps" and (world == 1 or case.accumulation == 1 or case.stage >= 2)


EACH = tuple(Case(*settings) for settings in itertools.product(STAGES, (1, 3), RECOMPUTE))
CORNERS = (
    *(Case(stage, accumulation) for stage in STAGES for accumulation in (1, 3)),
    *(Case(3, 3, recompute) for recompute in ("selective", "full", "chunks", "mlps")),
)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, CORNERS),
        (4, tuple(Case(stage, 3, "chunks") for stage in STAGES)),
        *(nightly(world, EACH) for world in (1, 2, 3, 4)),
    ],
)
def test_losses_equal_one_process(world: int, cases: tuple[Case, ...]) -> None:
    check(cases, on_ranks(world, train, cases))


def check(cases: Sequence[Case], results: list[list[list[float]]]) -> None:
    """Every rank sees the same, which is what one process finds, to the bit where sums have its order."""
    world = len(results)
    assert all(result == results[0] for result in results[1:])
    for case, losses in zip(cases, results[0], strict=True):
        expected = one_process(case, world)
        if same_order(case, world):
            assert losses[-1] == expected[-1], case
        assert losses == pytest.approx(expected, rel=1e-6), case


def waits_of_a_backward(layers: int, chunk: int, prefetch: int) -> list[tuple[int, bool]]:
    """Of the units that a second step's backward needs, as `needed` has them.

    A unit that is needed again at once, as between its recomputation and its backward, is listed once. When
    the first unit is needed, reductions of the gradients of those behind it have begun.
    """
    recompute = dataclasses.replace(RECOMPUTE["chunks"], recompute_num_layers=chunk)
    engine = engine_of(
        dataclasses.replace(MODEL, num_layers=layers),
        VOCAB,
        zero=ZeroConfig(zero_stage=3, zero_prefetch_units=prefetch),
        recompute=recompute,
    )
    backward = []

    def check(index: int) -> None:
        backward.append(engine.weights.prefetcher._phase is Phase.BACKWARD)
        if backward[-1] and index == 0:
            assert GradientState.EMPTY not in {unit.grad.state for unit in engine.units[2:]}

    found = needed(engine, check)
    waits = [wait for wait, is_backward in zip(found, backward[-len(found) :], strict=True) if is_backward]
    return [wait for last, wait in pairwise([(-1, False), *waits]) if wait[0] != last[0]]


def test_gathers_run_ahead_of_a_recomputed_chunk_and_inside_it() -> None:
    """Six layers are units 1 to 6 between the embedding and the head."""
    in_chunks = [7, 4, 5, 6, 5, 4, 1, 2, 3, 2, 1, 0]
    for prefetch in (1, 2, 3, 5):
        waits = waits_of_a_backward(6, 3, prefetch)
        assert [index for index, _ in waits] == in_chunks
        late = [index for index, late in waits if late]
        # With three slots the first chunk's layer 4 has the slot of layer 1.
        assert late == ([1] if prefetch == 2 else []), prefetch
    assert waits_of_a_backward(6, 6, 1) == [
        (index, False) for index in (7, 1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1, 0)
    ]
    in_pairs = waits_of_a_backward(6, 2, 1)
    assert [index for index, _ in in_pairs] == [7, 5, 6, 5, 3, 4, 3, 1, 2, 1, 0]
    assert [index for index, late in in_pairs if late] == [3, 1]  # two slots: 5, 3 and 1 take one of them
    assert not any(late for _, late in waits_of_a_backward(6, 1, 1))
    assert len(waits_of_a_backward(6, 1, 0)) == 8


def sending_at_once(topology: Topology) -> int:
    """How many layers of a backward keep gradients that are being sent, at most."""
    engine, most = build(Case(2), topology), 0
    reduce = UnitGradient.reduce

    def counted(*arguments: Any, **settings: Any) -> None:
        nonlocal most
        reduce(*arguments, **settings)
        most = max(most, sum(bool(unit.grad.sent) for unit in engine.units[1:-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitGradient, "reduce", counted)
        engine.accumulate(torch.randint(VOCAB, (2, 11)), index=0, micro_batches=1)
    engine.close()
    return most


def test_two_layers_send_gradients_at_a_time() -> None:
    """Or all of them would be in memory until the step."""
    assert on_ranks(2, sending_at_once) == [2, 2]


IN_NODES = (
    Case(1, 3),
    *(Case(stage, 3, groups=size) for stage, size in itertools.product((1, 2, 3), ("auto", "1"))),
    *(Case(3, 3),) * 2,
)


@pytest.mark.parametrize(("nodes", "local"), [(3, 2), nightly(2, 1), nightly(2, 3)])
def test_nodes_of_several_ranks_equal_one_process(nodes: int, local: int) -> None:
    """fp32 gradients, in two hops, also once for all micro-batches: the same sums in another order."""
    first, *others = on_ranks(nodes * local, train, IN_NODES, ranks_per_node=local)
    assert all(other == first for other in others)
    assert first[-1] == first[-2]
    for case, curve in zip(IN_NODES, first, strict=True):
        assert curve == pytest.approx(one_process(case, nodes * local), rel=1e-6), case


def test_variants_equal_one_process() -> None:
    """Untied output, 16-bit compute, any prefetch. In bf16 the bits are the same wherever the order is:
    gradients leave in the format they were made in and are summed in fp32."""
    cases = (
        *(Case(3, 3, prefetch=prefetch, precision=BF16) for prefetch in (0, 2, 9)),
        *(Case(stage, 2, untied=True, precision=BF16) for stage in (2, 3)),
        *(Case(stage, 1, precision=BF16) for stage in STAGES),
        *(Case(stage, 1, precision=FP16, steps=3) for stage in STAGES),  # the third is not skipped
    )
    assert all(same_order(case, 2) for case in cases)
    check(cases, on_ranks(2, train, cases))


def train_in_parts(topology: Topology, cases: tuple[Case, ...]) -> list[list[float]]:
    """`train` with every possible gradient in a separate segment."""
    gradients._SENT_FROM_THERE = 1
    return train(topology, cases)


def train_writing(topology: Topology, cases: tuple[Case, ...]) -> list[list[float]]:
    """`train` where ranks write each other's memory, each gradient that can be from where it was made."""
    build_module.CommStream, gradients._SENT_FROM_THERE = SharedMemoryStream, 1
    return train(topology, cases)


@pytest.mark.parametrize("train", [train, nightly(train_in_parts), train_writing])
def test_bf16_reduction_of_fp32_gradients_costs_its_rounding_and_no_more(train: Callable) -> None:
    reduced = PrecisionConfig(grad_reduce_in_bf16=True)
    cases = tuple(Case(stage, accumulation, precision=reduced) for stage in STAGES for accumulation in (1, 3))
    for case, losses in zip(cases, on_ranks(2, train, cases)[0], strict=True):
        expected = one_process(dataclasses.replace(case, precision=FP32), 2)
        assert losses[:-1] != expected[:-1]
        assert losses == pytest.approx(expected, rel=4 * torch.finfo(torch.bfloat16).eps), case


@pytest.mark.parametrize("world", [2, nightly(3)])
def test_ranks_that_write_each_others_memory_equal_one_process(world: int) -> None:
    """Two ranks with a width at which some gradients begin and end with blocks; units whose end is padded."""
    width = 48 if world == 2 else 36
    cases = tuple(
        Case(stage, accumulation, hidden_size=width, precision=precision)
        for stage, accumulation in ((0, 1), (0, 3), (1, 3), (2, 3), (3, 1))
        for precision in ((FP32, BF16) if accumulation == 1 or stage >= 2 else (FP32,))
    )
    cases += (Case(2, 1, hidden_size=36),)
    check(cases, on_ranks(world, train_writing, cases))


def wait_for_a_silent_peer(topology: Topology) -> float:
    """Seconds until rank 0's gather fails, rank 1 taking no part in it."""
    mesh = topology.mesh()
    comm_stream = CommStream(range(2), mesh, torch.device("cpu"), TrafficLedger(mesh), timedelta(seconds=2))
    started = time.monotonic()
    if topology.rank == 0:
        with pytest.raises(RuntimeError):
            comm_stream.submit(lambda: comm_stream.all_gather(torch.zeros(8), torch.zeros(4))).wait()
    return time.monotonic() - started


def test_the_time_limit_of_collectives_holds_on_every_stream() -> None:
    waited, _ = on_ranks(2, wait_for_a_silent_peer)
    assert 1.5 < waited < 120
