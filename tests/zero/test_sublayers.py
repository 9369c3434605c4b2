"""Units that are half a layer (--zero-unit sublayer): the numbers, bits and waits of whole layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.states import formats_of_units
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero import zeropp_engines as zeropp
from tests.zero.engines import (
    all_states,
    engine_of,
    model_of,
    needed,
    operations,
    same_bits,
    train,
    weights_of,
)
from tests.zero.ranks import on_ranks
from tests.zero.test_stages import RECOMPUTE

VOCAB, STEPS, LAYERS = 101, 2, 4
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODEL = model_of(num_layers=LAYERS, num_attention_heads=4, seq_length=10, **DROPOUT)
FP32, BF16 = PrecisionConfig(), PrecisionConfig(bf16=True)
SUBLAYER: dict[str, Any] = {"zero_unit": "sublayer"}
STAGE_3: dict[str, Any] = {"zero_stage": 3}
HPZ, ALL, DELTA4 = (STAGE_3 | zero for zero in (zeropp.HPZ, zeropp.ALL, zeropp.DELTA4 | zeropp.QGZ))


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


# (ZeRO, recomputation, precision, clipping, micro-batches, tensor ranks)
Case = tuple[dict[str, Any], str, PrecisionConfig, float, int, int]
STAGES: list[Case] = [({"zero_stage": stage}, "stored", FP32, 1.0, 1, 1) for stage in range(4)]
PASSES: list[Case] = [
    *(({"zero_stage": 3}, recompute, FP32, 0.0, 2, 1) for recompute in ("full", "chunks", "mlps")),
    ({"zero_stage": 3, "zero_offload_optimizer": True}, "full", BF16, 1.0, 1, 1),
]
MORE_PASSES: list[Case] = [
    *(({"zero_stage": 3}, recompute, FP32, 0.0, 2, 1) for recompute in ("stored", "selective")),
    ({"zero_stage": 3, "zero_prefetch_units": 0}, "chunks", FP32, 0.0, 1, 1),
    ({"zero_stage": 3, "zero_prefetch_units": 2}, "full", FP32, 0.0, 1, 1),
]
IN_BF16: list[Case] = [({"zero_stage": stage}, "full", BF16, 0.0, 2, 1) for stage in range(4)]
ZEROPP: list[Case] = [(zero, "full", BF16, 1.0, 2, 1) for zero in (HPZ, ALL, DELTA4)]
MORE_ZEROPP: list[Case] = [(ALL | {"zero_gradient_partition_size": "auto"}, "full", BF16, 1.0, 2, 1)]
TENSOR: list[Case] = [({"zero_stage": stage}, "full", FP32, 0.0, 2, 2) for stage in (0, 3)]


def in_both_units(topology: Topology, cases: list[Case]) -> list[tuple[bool, list[list[float]]]]:
    """Whether weights, after two steps, have the bits of whole layers', and the losses of both."""
    found = []
    for zero, recompute, precision, clip_grad, micro_batches, tensor in cases:
        weights, losses = [], []
        for more in ({}, SUBLAYER):
            engine = build(topology, zero | more, recompute, precision, clip_grad, tensor)
            assert len(engine.units) == 2 + LAYERS * (2 if more else 1)
            losses.append(train(engine, range(STEPS), micro_batches))
            weights.append(weights_of(engine))
            engine.close()
        whole, halves = weights
        found.append((same_bits(whole, halves), losses))
    return found


@pytest.mark.parametrize(
    ("ranks", "local", "cases"),
    [
        nightly(1, 1, STAGES, id="1"),
        pytest.param(2, 2, [STAGES[1], *PASSES[1:]], id="2"),
        nightly(2, 2, [*STAGES, PASSES[0]], id="2-stages"),
        pytest.param(4, 2, [ZEROPP[-1], TENSOR[1]], id="2x2"),
        nightly(4, 2, ZEROPP[:-1], id="2x2-ZeRO++"),
        nightly(2, 2, [*IN_BF16, *MORE_PASSES], id="2-more"),
        # At stage 0 a library sums over nodes: with more than two ranks its order depends on the sizes.
        nightly(4, 2, [*IN_BF16[1:], *MORE_ZEROPP, TENSOR[0]], id="2x2-more"),
    ],
)
def test_whole_layers_and_halves_train_to_the_same_bits(ranks: int, local: int, cases: list[Case]) -> None:
    """Every stage, recomputation with dropout, ZeRO++ on two nodes of two ranks, tensor ranks.

    No block of codes holds parts of two parameters, and the clipping factor is rounded from fp64.
    """
    for found in on_ranks(ranks, in_both_units, cases, ranks_per_node=local):
        for case, (same, (whole, halves)) in zip(cases, found, strict=True):
            assert same, case
            assert whole == halves, case


def resumed(topology: Topology, directory: str, zero: dict[str, Any]) -> list[bool]:
    """Whether a run that changes its units at a resume, in both directions, is the run that does not."""
    same = []
    whole = build(topology, zero, "full", BF16, 1.0)
    train(whole, range(4))
    expected = all_states(whole)
    for number, (before, after) in enumerate((({}, SUBLAYER), (SUBLAYER, {}))):
        engine = build(topology, zero | before, "full", BF16, 1.0)
        train(engine, range(2))
        path = save(Path(directory) / str(number), engine, Progress(iteration=2))
        engine.close()
        again = build(topology, zero | after, "full", BF16, 1.0)
        load_checkpoint(path, again, TOKENIZER, with_optimizer=True)
        train(again, range(2, 4))
        same.append(same_bits(all_states(again), expected))
        again.close()
    return same


@pytest.mark.parametrize("zero", [DELTA4, nightly({"zero_stage": 2})], ids=["delta4", "stage_2"])
def test_a_resume_may_change_the_units(zero: dict[str, Any], tmp_path: Path) -> None:
    """Weights, moments and the references of weight differences, bit for bit."""
    for same in on_ranks(4, resumed, str(tmp_path), zero, ranks_per_node=2):
        assert all(same), same


def test_the_formats_of_differences_follow_the_parameters() -> None:
    """A half takes after its layer, and a layer after either of its halves."""
    entry = {"shape": [3, 2]}
    whole = [{"parameters": {"a": entry, "b": entry}}, {"parameters": {"c": entry, "d": entry}}]
    halves = [{"parameters": {name: entry}} for name in "abcd"]
    of_whole = {"raised": [False, True], "measured": [[4.0, 1.0], [9.0, 8.0]]}
    of_halves = {
        "raised": [False, False, True, True],
        "measured": [[4.0, 1.0], [4.0, 1.0], [9.0, 8.0], [9.0, 8.0]],
    }
    assert formats_of_units(of_whole, whole, whole) == of_whole
    assert formats_of_units(of_whole, whole, halves) == of_halves
    assert formats_of_units(of_halves, halves, whole) == {
        "raised": [False, True],
        "measured": [[8.0, 2.0], [18.0, 16.0]],
    }
    assert formats_of_units(None, whole, whole) is None


def late_gathers(recompute: str, prefetch: int) -> list[int]:
    """The units whose gather started only when the compute of a second step needed them."""
    zero = {"zero_stage": 3, "zero_prefetch_units": prefetch} | SUBLAYER
    engine = build(Topology(), zero, recompute)
    return [index for index, late in needed(engine) if late]


def test_no_pass_waits_for_halves_that_could_be_gathered_ahead() -> None:
    for recompute in ("stored", "selective", "full"):
        for prefetch in (1, 2, 3):
            assert late_gathers(recompute, prefetch) == [], (recompute, prefetch)
    assert late_gathers("stored", 0) != []
