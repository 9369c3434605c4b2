"""The plan's bytes are the ledgers', for every link, to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.traffic import total, traffic_of
from megatron_zpp.zero.engine import ZeroEngine
from tests.plan.jobs import FOUR_BITS, FULL, HPZ, NO_DROPOUT, QGZ, QWZ, engine_of, job_of, printed
from tests.support import nightly, trained
from tests.zero.ranks import on_ranks

VOCAB = 300
MODEL = ModelConfig(num_layers=5, hidden_size=64, num_attention_heads=4, seq_length=8, **NO_DROPOUT)
STAGE_3 = {"zero_stage": 3}
ALL = STAGE_3 | QWZ | HPZ | QGZ

Case = tuple[dict[str, Any], dict[str, Any], int]  # ZeRO, recomputation, micro-batches
CASES: list[Case] = [
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
]
NIGHTLY = [case for place, case in enumerate(CASES) if place % 3]


def measure(topology: Topology, cases: list[Case]) -> list[tuple[int, int]]:
    """(intra, inter) bytes that this rank sends in a step in the middle of a run, by case."""
    jobs = map(planned, cases)
    return [sent_in_a_step(engine_of(job, topology), job) for job in jobs]


def planned(case: Case) -> Job:
    """The job of a case on two nodes of two ranks."""
    zero, recompute, count = case
    return job_of(MODEL, VOCAB, zero=zero, recompute=recompute, nodes=2, local=2, micro_batches=count)


def sent_in_a_step(engine: ZeroEngine, job: Job) -> tuple[int, int]:
    """(intra, inter) bytes that this rank sends in a second step: the first also gathers initial weights."""
    for _ in range(2):
        engine.take_traffic()
        for index in range(job.micro_batches):
            tokens = torch.zeros(1, job.model.seq_length + 1, dtype=torch.long)
            engine.accumulate(tokens, index=index, micro_batches=job.micro_batches)
        engine.step(1e-3)
    return engine.take_traffic()


@pytest.mark.parametrize("cases", [CASES[::3], nightly(NIGHTLY)], ids=["some", "others"])
def test_the_plan_is_what_the_ranks_send(cases: list[Case]) -> None:
    """On two nodes of two ranks; tests/exchange/ has each unit's bytes on other meshes."""
    for case, *sent in zip(cases, *on_ranks(4, measure, cases, ranks_per_node=2), strict=True):
        found = SentBytes(*map(sum, zip(*sent, strict=True)))
        assert found == total(traffic_of(planned(case))), case


def test_the_plan_of_dry_run_is_the_engines() -> None:
    """On one rank, whose engine needs no group; elsewhere the bytes and the memory are compared."""
    for zero, recompute, _ in CASES:
        if "zero_quantized_weights_format" in zero:
            continue  # differences need more ranks
        job = job_of(MODEL, VOCAB, zero=zero, recompute=recompute, copy_engines=False)
        assert engine_of(job).plan == job.communication


def run_and_planned(
    directory: Path, flags: str, nodes: int, **variables: str
) -> tuple[list[dict[str, Any]], dict[str, int], str]:
    """Records of the steps of two ranks, the planned bytes of the same command line, and what they said."""
    argv = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 3 --hidden-size 32 --bf16 "
        "--num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --train-iters 3 --lr 1e-3 "
        f"--log-interval 1 --eval-iters 0 --num-workers 0 --zero-stage 3 --zero-quantized-weights {flags}"
    ).split()
    out = trained(*argv, "--metrics-file", directory / "metrics.jsonl", processes=2, **variables)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    grid = f"--plan-nodes {nodes} --plan-gpus-per-node {2 // nodes} --plan-link-gbit 100".split()
    lines = map(str.split, printed(*argv, "--dry-run", *grid).splitlines())
    found = {line[0]: int(line[1].replace(",", "")) for line in lines if line and "_node_bytes" in line[0]}
    return records, found, out


def test_the_plan_is_what_a_run_writes_to_its_metrics(tmp_path: Path) -> None:
    """The same command line with and without --dry-run, with accumulation and all of ZeRO++."""
    flags = "--global-batch-size 12 --zero-hpz-partition-size auto --zero-quantized-gradients"
    (*_, last), planned, _ = run_and_planned(tmp_path, flags, 1)
    assert planned == {name: last[name] for name in ("intra_node_bytes", "inter_node_bytes")}
    assert last["intra_node_bytes"] > 0


def test_the_plan_counts_the_weight_differences_of_a_run_of_two_nodes(tmp_path: Path) -> None:
    flags, nodes = "--zero-quantized-weights-format delta4 --zero-hpz-partition-size auto", 2
    variables = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    records, planned, said = run_and_planned(tmp_path, flags, nodes, **variables)
    sent = [record["inter_node_bytes"] for record in records]  # the first step sends key frames, too
    assert sent[1:] == [planned["inter_node_bytes"]] * 2
    assert sent[0] > sent[1]
    assert [record["raised_units"] for record in records] == [0] * 3
    assert "| raised units: 0 |" in said
