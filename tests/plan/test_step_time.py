"""The model of the step time: its limits by other arithmetic, and what it must say of what was measured."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common import RESULTS
from benchmarks.plan_rows import context_rows, h200, h200_rows, nvlink_rows, socket_rows
from benchmarks.plan_tensor import fitted_slowdown, tensor_rows
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.plan.hardware import (
    ATTENTION_CHANNELS,
    ATTENTION_MARGIN,
    ATTENTION_RATE,
    TENSOR_SLOWDOWN,
    Machine,
    machine,
)
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.step_time import StepTime, compute_seconds, step_time
from megatron_zpp.plan.traffic import total, traffic_of
from tests.plan.jobs import FOUR_BITS, FULL, NO_DROPOUT, job_of

MODEL = ModelConfig(num_layers=12, hidden_size=1024, num_attention_heads=16, seq_length=512, **NO_DROPOUT)
INFINITE = float("inf")
GPU = Machine(flops=5e14, memory_rate=INFINITE, inside=INFINITE, link=INFINITE)
LARGER, H100 = ModelConfig(model_preset="6.7b", **NO_DROPOUT), machine(PlanConfig(dry_run=True), "bfloat16")
GRID = {"nodes": 4, "local": 8, "micro_batch_size": 4, "micro_batches": 2}


def job(zero: dict | None = None, **more: object) -> Job:
    return job_of(MODEL, 1000, zero={"zero_stage": 3} if zero is None else zero, **GRID | more)


def timed(machine: Machine, zero: dict | None = None, **more: object) -> StepTime:
    planned = job(zero, **more)
    return step_time(planned, machine, traffic_of(planned))


def test_without_links_and_memory_a_step_is_its_flops() -> None:
    """On one GPU: 6 N per token, and attention to the tokens before it; recomputation adds a forward."""
    one = timed(GPU, {"zero_stage": 0}, nodes=1, local=1)
    layers, channels = 12 * 12 * 1024**2, 1024 / 16
    attended = (512 / 2 + ATTENTION_MARGIN) * (1 + ATTENTION_CHANNELS / channels) / ATTENTION_RATE
    scores = 4 * 12 * 1024 * attended
    flops = 4 * 512 * 2 * (6 * (layers + 1024 * 1024) + 3 * scores)
    assert one.seconds == pytest.approx(flops / 5e14, rel=0.01)
    again = timed(GPU, {"zero_stage": 0}, nodes=1, local=1, recompute=FULL)
    matrices = 4 * 512 * 2 * (2 * layers + scores)
    assert again.seconds - one.seconds == pytest.approx(matrices / 5e14, rel=1e-6)
    assert again.forward == one.forward


@pytest.mark.parametrize(("samples", "most"), [(1, 1.05), (16, 1.001)])
def test_products_of_few_tokens_take_longer_per_token(samples: int, most: float) -> None:
    """512 tokens on a machine that computes 173 while it reads as many weights, as an H100 does."""
    one = job({"zero_stage": 0}, nodes=1, local=1, micro_batch_size=samples)
    slow = compute_seconds(one, dataclasses.replace(GPU, memory_rate=GPU.flops / 173), True)
    assert 1 < slow / compute_seconds(one, GPU, True) < most


def test_compute_takes_longer_beside_kernels_that_send_than_beside_copies() -> None:
    copied, sent = (job(nodes=1, local=2, copy_engines=used) for used in (True, False))
    assert compute_seconds(sent, GPU, True) > compute_seconds(copied, GPU, True)


def test_on_a_very_slow_link_a_step_is_its_bytes() -> None:
    slow = dataclasses.replace(GPU, link=1e3)
    sent = total(traffic_of(job()))
    assert timed(slow).seconds == pytest.approx(sent.inter / 4 / 1e3, rel=1e-3)
    inside = dataclasses.replace(GPU, inside=1e3)
    assert timed(inside).seconds == pytest.approx(sent.intra / 32 / 1e3, rel=1e-3)


def test_faster_parts_never_make_a_step_slower() -> None:
    machine = Machine(flops=1e14, memory_rate=1e12, inside=5e10, link=1e10, gather=5e9, exchange=4e9)
    before = timed(machine).seconds
    for rate, value in vars(machine).items():
        assert timed(dataclasses.replace(machine, **{rate: 3 * value})).seconds <= before * (1 + 1e-12)
    everything = dataclasses.replace(machine, **{name: 3 * value for name, value in vars(machine).items()})
    plain = {"zero_stage": 0}
    assert timed(everything, plain).seconds == pytest.approx(timed(machine, plain).seconds / 3, rel=0.01)


def test_offloaded_states_make_the_optimizer_slower_and_nothing_else() -> None:
    machine = Machine(flops=1e14, memory_rate=1e12, inside=5e10, link=1e10)
    plain, offloaded = (
        timed(machine, {"zero_stage": 3} | more) for more in ({}, {"zero_offload_optimizer": True})
    )
    assert offloaded.optimizer > plain.optimizer
    assert dataclasses.replace(offloaded, optimizer=plain.optimizer) == plain


@pytest.mark.parametrize(("nodes", "local"), [(4, 8), (32, 1)])
def test_every_gather_of_a_reference_casts_it(nodes: int, local: int) -> None:
    """Of 4 bits, and 2 bytes per block of 256: each rank's part is read in fp32 and written in bf16."""
    one = job(FOUR_BITS, nodes=nodes, local=local, micro_batches=1)
    forward, backward = traffic_of(one)
    memory = dataclasses.replace(GPU, memory_rate=1e12)
    compute = compute_seconds(one, memory, True)
    part = sum(layout.numel for layout in one.layouts) // local
    exchanged = part * (4 / 8 + 2 / 256 + 8)  # every message moves the fp32 reference
    expected = (exchanged + part * 6) / 1e12
    assert step_time(one, memory, [forward]).forward - compute == pytest.approx(expected, rel=1e-9)
    in_slots = {layout: min(2, count) for layout, count in Counter(one.layouts).items()}
    again = part - sum(layout.numel * count for layout, count in in_slots.items()) // local
    assert (forward.cast, backward.cast) == (part, again)


@pytest.mark.parametrize(
    ("rows_of", "count", "within"), [(h200_rows, 7, 0.05), (nvlink_rows, 4, 0.05), (socket_rows, 4, 0.1)]
)
def test_measured_steps_are_predicted(
    rows_of: Callable[[], list[dict[str, Any]]], count: int, within: float
) -> None:
    """Memory within 1%, time within 5%: between two H200s on NVLink, and by the share of another machine.

    Over sockets, by the rates of collectives, within 10%. Only the share of the peak is fitted, to one GPU.
    """
    rows = rows_of()
    assert len(rows) == count
    for row in rows:
        assert row["gib"] == pytest.approx(row["measured_gib"], rel=0.01), row
        assert row["milliseconds"] == pytest.approx(row["measured_ms"], rel=within), row


@pytest.mark.parametrize(("size", "samples", "length"), [("1b", 8, 2048), ("3b", 2, 4096)])
def test_measured_steps_of_a_llama_are_predicted(size: str, samples: int, length: int) -> None:
    """Memory within 0.5%, time within 5%, with the planner's share of the peak."""
    figures = json.loads((RESULTS / f"throughput_llama_{size}.json").read_text())["figures"]
    measured = figures[f"llama3.2-{size}:{samples}"]["stage 0"]
    model = ModelConfig(model_preset=f"llama3.2-{size}", seq_length=length)
    planned = job_of(model, figures["settings"]["vocab_size"], micro_batch_size=samples)
    one = dataclasses.replace(planned, compiled=True)
    assert memory_of(one).peak / 2**30 == pytest.approx(measured["peak_gib"], rel=0.005)
    found = 1000 * step_time(one, h200(), traffic_of(one)).seconds
    assert found == pytest.approx(measured["milliseconds"], rel=0.05)


def test_measured_runs_of_two_h100s_are_predicted() -> None:
    """Memory within 1%, time within 4%; of 65,536 tokens, by attention's rate on H200s, within 8%."""
    assert fitted_slowdown() == TENSOR_SLOWDOWN
    rows = tensor_rows()
    assert len(rows) == 6
    for row in rows:
        assert row["gib"] == pytest.approx(row["measured_gib"], rel=0.01), row
        within = 0.08 if "65,536" in row["run"] else 0.04
        assert row["milliseconds"] == pytest.approx(row["measured_ms"], rel=within), row
    assert [row["run"] for row in rows if not row["fitted"]] == [
        "T = 2, exchanges by NCCL",
        "T = 2, 1.3B, 65,536 tokens",
        "ZeRO-3",
    ]


def test_measured_steps_of_long_samples_are_predicted() -> None:
    """Memory within 5%; time within 11%, but of runs of one step, whose start counts."""
    rows = context_rows()
    assert len(rows) == 9
    for row in rows:
        assert row["gib"] == pytest.approx(row["measured_gib"], rel=0.05), row
        if row["run"].startswith(("32k", "128k")):
            assert row["milliseconds"] == pytest.approx(row["measured_ms"], rel=0.11), row
