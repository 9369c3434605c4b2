"""The plan's bytes are the ledgers', for every link, to the byte; its states are those that ranks hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.plan.exchanges import ledgers_of
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.traffic import total, traffic_of
from megatron_zpp.zero.engine import ZeroEngine
from tests.plan.jobs import FOUR_BITS, FULL, HPZ, NO_DROPOUT, QGZ, QWZ, engine_of, job_of, printed
from tests.support import nightly, recorded
from tests.zero.ranks import on_ranks
from tests.zero.test_closed_forms import live_bytes

VOCAB = 300
MODEL = ModelConfig(num_layers=5, hidden_size=128, num_attention_heads=4, seq_length=8, **NO_DROPOUT)
STAGE_3 = {"zero_stage": 3}
ALL = STAGE_3 | QWZ | HPZ | QGZ

ADAMW, MUON = (OptimizerConfig(optimizer=name, weight_decay=0.1) for name in ("adam", "muon"))
MUON_IN_BF16 = replace(
    MUON,
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="fp8",
    muon_row_scaling_beta2=0.95,
)
FP32, IN_BF16 = PrecisionConfig(fp32=True), PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)

Case = tuple[dict[str, Any], dict[str, Any], int] | tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]
CASES: list[Case] = [  # ZeRO, recomputation, micro-batches, more of the job
    *(({"zero_stage": stage}, {}, 2) for stage in (0, 1, 2)),
    (STAGE_3, {}, 5),
    *(({"zero_stage": stage} | QWZ | QGZ, {}, 2) for stage in (1, 2)),
    (STAGE_3 | QWZ, FULL, 2),
    (STAGE_3 | HPZ, FULL | {"recompute_num_layers": 3}, 2),
    (STAGE_3 | {"zero_prefetch_units": 0}, FULL | {"recompute_num_layers": 2}, 3),
    (
        STAGE_3 | {"zero_prefetch_units": 2},
        FULL | {"recompute_method": "block", "recompute_num_layers": 2},
        1,
    ),
    (STAGE_3 | QGZ | {"zero_quantized_gradients_format": "int8"}, {"recompute_granularity": "selective"}, 1),
    (ALL, FULL, 1),
    (FOUR_BITS, FULL, 2),
    (FOUR_BITS | {"zero_gradient_partition_size": "auto"}, {}, 3),
    *((FOUR_BITS | {"zero_stage": stage, "zero_hpz_partition_size": "1"}, {}, 2) for stage in (1, 2)),
    *((ALL | {"zero_gradient_partition_size": size}, FULL, n) for size in ("auto", "1") for n in (1, 4)),
    ({"zero_stage": 1, "zero_gradient_partition_size": "auto"}, {}, 3),
    (STAGE_3 | HPZ | {"zero_gradient_partition_size": "auto"}, {}, 3),
    *(({"zero_unit": "sublayer"} | zero, FULL, 2) for zero in (STAGE_3, ALL, FOUR_BITS)),
    (STAGE_3 | {"zero_unit": "sublayer"}, FULL | {"recompute_num_layers": 2}, 1),
    (STAGE_3 | {"zero_prefetch_units": 3, "zero_unit": "sublayer"}, FULL, 1),
    *(({"zero_stage": stage}, {}, 1, {"precision": IN_BF16}) for stage in (0, 1, 2)),
    *((zero, {}, 1, {"precision": FP32}) for zero in ({"zero_stage": 2}, STAGE_3, ALL)),
    *((zero, {}, 1, {"optimizer": MUON}) for zero in ({"zero_stage": 0}, STAGE_3, FOUR_BITS)),
    (STAGE_3, {}, 1, {"optimizer": MUON_IN_BF16}),
    *((zero | QWZ, {}, 2, {"optimizer": MUON}) for zero in ({"zero_stage": 1}, STAGE_3, {"zero_stage": 2})),
]
SHARED: list[Case] = [
    *(({"zero_stage": stage}, {}, 2) for stage in (0, 1, 2, 3)),
    (ALL, {}, 2),
    (STAGE_3 | HPZ | {"zero_gradient_partition_size": "auto"}, {}, 2),
    ({"zero_stage": 0}, {}, 2, {"optimizer": MUON}),
    (STAGE_3, {}, 2, {"optimizer": replace(MUON, muon_row_scaling_beta2=0.95)}),
]
NIGHTLY = [case for place, case in enumerate(CASES) if place % 5]


Measured = tuple[tuple[int, int], int, bool]


def measure(topology: Topology, cases: list[Case], tensor: int = 1) -> list[Measured]:
    """Bytes (intra, inter) that this rank sends in a second step, those of its states, whether its layouts
    are planned; by case.
    """
    found = []
    for case in cases:
        job = planned(case, topology.nodes, topology.local_world_size, tensor)
        engine = engine_of(job, topology)
        sent, states = sent_in_a_step(engine, job), live_bytes(engine)
        layouts = [each.layout for each in engine.plan.units]
        found.append((sent, states, topology.rank > 0 or layouts == job.layouts))
        engine.close()
    return found


def planned(case: Case, nodes: int = 2, local: int = 2, tensor: int = 1) -> Job:
    """The job of a case."""
    zero, recompute, count, *others = case
    more = {"optimizer": ADAMW, "tensor": tensor, "copy_engines": False}  # CPUs have none
    more |= others[0] if others else {}
    return job_of(
        MODEL, VOCAB, zero=zero, recompute=recompute, nodes=nodes, local=local, micro_batches=count, **more
    )


def check(cases: list[Case], nodes: int, local: int, tensor: int = 1) -> None:
    """Traffic to the byte, and states to 0.1%."""
    ranks = on_ranks(nodes * local, measure, cases, tensor, ranks_per_node=local)
    for case, *found in zip(cases, *ranks, strict=True):
        job, (sent, states, same) = planned(case, nodes, local, tensor), zip(*found, strict=True)
        assert SentBytes(*map(sum, zip(*sent, strict=True))) == ledgers_of(job, total(traffic_of(job))), case
        assert all(same), case
        resident, adamw = memory_of(job).resident, job.optimizer is ADAMW
        allowed = 1e-3 if adamw or tensor > 1 else 3e-3  # Muon has no states of padding, which is planned
        assert resident == pytest.approx(max(states), rel=allowed), case
        if adamw:  # ranks under Muon work on matrices of other sizes
            assert resident == pytest.approx(min(states), rel=allowed), case


def sent_in_a_step(engine: ZeroEngine, job: Job) -> tuple[int, int]:
    """(intra, inter) bytes that this rank sends in a second step: the first also gathers initial weights."""
    for _ in range(2):
        engine.take_traffic()
        for index in range(job.micro_batches):
            tokens = torch.zeros(1, job.model.seq_length + 1, dtype=torch.long)
            engine.accumulate(tokens, index=index, micro_batches=job.micro_batches)
        engine.step(1e-3)
    return engine.take_traffic()


@pytest.mark.parametrize("cases", [CASES[::5], nightly(NIGHTLY)], ids=["some", "others"])
def test_the_plan_is_what_the_ranks_send_and_hold(cases: list[Case]) -> None:
    """On two nodes of two ranks; tests/exchange/ has each unit's bytes on other meshes."""
    check(cases, 2, 2)


@pytest.mark.parametrize(
    ("nodes", "local", "cases"), [(2, 2, SHARED), (1, 4, SHARED[::3]), nightly(1, 4, SHARED)]
)
def test_the_plan_is_what_tensor_ranks_send_and_hold(nodes: int, local: int, cases: list[Case]) -> None:
    """Two for each data rank."""
    check(cases, nodes, local, tensor=2)


def test_the_plan_of_dry_run_is_the_engines() -> None:
    """On one rank, whose engine needs no group; elsewhere the bytes and the memory are compared."""
    for case in CASES:
        if "zero_quantized_weights_format" not in case[0]:  # differences need more ranks
            job = planned(case, 1, 1)
            assert engine_of(job).plan == job.communication


@pytest.mark.parametrize(
    ("nodes", "flags"),
    [
        (1, "--global-batch-size 12 --zero-hpz-partition-size auto --zero-quantized-gradients"),
        (2, "--zero-quantized-weights-format delta4 --zero-hpz-partition-size auto"),
    ],
)
def test_the_plan_is_what_a_run_writes_to_its_metrics(nodes: int, flags: str, tmp_path: Path) -> None:
    """The same command line of two ranks with and without --dry-run, with accumulation and all of ZeRO++."""
    argv = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 3 --hidden-size 32 --bf16 "
        "--num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --train-iters 3 --lr 1e-3 "
        f"--log-interval 1 --eval-iters 0 --num-workers 0 --zero-stage 3 --zero-quantized-weights {flags}"
    ).split()
    place = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"} if nodes == 2 else {}
    records, said = recorded(tmp_path / "metrics.jsonl", *argv, processes=2, **place)
    grid = f"--plan-nodes {nodes} --plan-gpus-per-node {2 // nodes} --plan-link-gbit 100".split()
    lines = map(str.split, printed(*argv, "--dry-run", *grid).splitlines())
    found = {line[0]: int(line[1].replace(",", "")) for line in lines if line and "_node_bytes" in line[0]}
    for record in records[1:]:
        assert found == {name: record[name] for name in ("intra_node_bytes", "inter_node_bytes")}
    assert found["intra_node_bytes" if nodes == 1 else "inter_node_bytes"] > 0
    if nodes == 2:  # the first step sends key frames, too
        assert records[0]["inter_node_bytes"] > found["inter_node_bytes"]
        assert [record["raised_units"] for record in records] == [0] * 3
        assert "| raised units: 0 |" in said
