"""What a plan recommends must follow from its own numbers, and be right where the answer is known."""

import dataclasses
import math

import pytest

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.plan.advice import advice_of, at_stage, least_that_pays, plan_of, zeropp_plans
from megatron_zpp.plan.fitting import faster_stage, ways_to_fit
from megatron_zpp.plan.hardware import GPUS, USABLE, Machine, machine
from megatron_zpp.plan.memory import memory_of
from tests.plan.jobs import FOUR_BITS, HPZ, NO_DROPOUT, QGZ, QWZ, job_of

SMALL = ModelConfig(model_preset="1.3b", **NO_DROPOUT)


def rates(link: float) -> Machine:
    return machine(PlanConfig(dry_run=True, plan_gpu="h200", plan_link_gbit=link), "bfloat16")


def test_nothing_pays_where_the_compute_hides_all_that_is_sent() -> None:
    """On NVLink all of ZeRO++ was measured at 0.987 of plain stage 3."""
    job = job_of(SMALL, 50304, zero={"zero_stage": 3}, local=2, micro_batch_size=8)
    plans = zeropp_plans(job, rates(100))
    assert len(plans) == 8
    assert least_that_pays(plans, GPUS["h200"].memory) is plans[0]


def test_all_of_it_pays_on_a_slow_link() -> None:
    job = job_of(SMALL, 50304, zero={"zero_stage": 3}, nodes=4, local=8, micro_batch_size=4)
    plain, *_, everything = plans = zeropp_plans(job, rates(10))
    assert least_that_pays(plans, GPUS["h200"].memory) is everything
    assert everything.name == (
        "--zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients"
    )
    assert everything.sent.inter < 0.25 * plain.sent.inter
    less = everything.memory.peak / USABLE / 2**30 - 0.01
    assert not everything.fits(less)
    assert least_that_pays(plans, less).fits(less)


def test_an_option_that_leaves_the_wait_does_not_pay() -> None:
    """hpZ saves no byte on a link that only the reduction uses (stage 1 has no hpZ)."""
    job = job_of(SMALL, 50304, zero={"zero_stage": 1}, nodes=4, local=8, micro_batch_size=4)
    names = [plan.name for plan in zeropp_plans(job, rates(10))]
    weights, gradients = "--zero-quantized-weights", "--zero-quantized-gradients"
    assert names == ["none of them", weights, gradients, f"{weights} {gradients}"]
    assert len(zeropp_plans(at_stage(job, 0), rates(10))) == 1


def test_a_run_keeps_its_formats_in_every_alternative() -> None:
    zero = {"zero_stage": 3, "zero_quantized_gradients_format": "int8"} | QWZ | QGZ
    job = job_of(SMALL, 50304, zero=zero, nodes=2, local=4)
    same = [plan for plan in zeropp_plans(job, rates(100)) if plan.job.zero == job.zero]
    assert [plan.name for plan in same] == ["--zero-quantized-weights --zero-quantized-gradients"]
    assert at_stage(job, 3).zero == job.zero
    assert not at_stage(job, 0).zero.quantizes


def test_settings_that_would_fit_are_found() -> None:
    big = ModelConfig(model_preset="13b", **NO_DROPOUT)
    job = job_of(big, 50304, zero={"zero_stage": 1}, nodes=4, local=8, micro_batch_size=8, micro_batches=2)
    ways = {plan.name: plan for plan in ways_to_fit(job, rates(400))}
    whole = plan_of("", job, rates(400))
    assert not whole.fits(GPUS["h100"].memory)
    recompute = "--recompute-granularity full --recompute-method uniform"
    assert set(ways) == {
        "--zero-stage 2",
        "--zero-stage 3",
        *(f"--micro-batch-size {size}" for size in (4, 2, 1)),
        "--zero-unit sublayer",
        recompute,
        "--zero-offload-optimizer",
        "all of these",
    }
    assert all(plan.memory.peak < whole.memory.peak for plan in ways.values())
    assert ways["all of these"].memory.peak == min(plan.memory.peak for plan in ways.values())
    assert all(plan.job.tokens_per_step == job.tokens_per_step for plan in ways.values())
    assert ways[recompute].time.seconds > whole.time.seconds
    assert ways["--zero-offload-optimizer"].memory.cpu > 0


def test_a_stage_that_fits_and_gathers_less_often_is_offered() -> None:
    """Stage 2 gathers once per step and stage 3 twice per micro-batch; stage 0 does not fit 20 GiB."""
    job = job_of(SMALL, 50304, zero={"zero_stage": 3}, nodes=4, local=8, micro_batches=4)
    plan = plan_of("", job, rates(100))
    faster = faster_stage(plan, rates(100), 20)
    assert faster is not None
    assert faster.name in ("--zero-stage 1", "--zero-stage 2")
    assert faster.time.seconds < 0.99 * plan.time.seconds
    assert faster.fits(20)
    assert faster_stage(plan, rates(100), memory_of(job).peak / 2**30 / 0.9) is None  # only this stage fits
    assert faster_stage(faster, rates(100), 20) is None
    alone = plan_of("", job_of(SMALL, 50304), rates(100))
    assert faster_stage(alone, rates(100), 20) is None


HELD = PrecisionConfig(bf16=True, fp8=True, fp8_recipe="delayed", fp8_param_gather=True)
NODES, NODE = {"nodes": 2, "local": 4}, {"nodes": 1, "local": 8}
DELTA4, ROTATED4 = "--zero-quantized-weights-format delta4", "--zero-quantized-gradients-format rotated4"


def test_accumulation_inside_nodes_is_advised_where_gradients_cross_the_link_every_micro_batch() -> None:
    job = job_of(SMALL, 50304, zero={"zero_stage": 3}, micro_batches=4, **NODES)
    (advice,) = advice_of(job, math.inf)
    assert advice.startswith("--zero-gradient-partition-size auto would send ")
    for other in (
        dataclasses.replace(job, micro_batches=1),
        dataclasses.replace(job, nodes=1),
        dataclasses.replace(job, zero=dataclasses.replace(job.zero, zero_gradient_partition_size="auto")),
        dataclasses.replace(job, zero=ZeroConfig(zero_stage=1)),
    ):
        assert advice_of(other, math.inf) == []
    assert advice_of(job, memory_of(job).peak / 2**30) == []  # it would not fit


@pytest.mark.parametrize("precision", [None, HELD])
def test_weight_differences_are_advised_where_all_of_zeropp_is_on(precision: PrecisionConfig | None) -> None:
    """Also for weights that are held as codes, without --zero-quantized-weights."""
    weights, flag = (QWZ, "") if precision is None else ({}, "--zero-quantized-weights ")
    zero = {"zero_stage": 3} | weights | HPZ | QGZ

    def advised(zero: dict, grid: dict = NODES, gibibytes: float = math.inf) -> list[str]:
        return advice_of(job_of(SMALL, 50304, zero=zero, precision=precision, **grid), gibibytes)

    (advice,) = advised(zero)
    assert advice.startswith(f"{flag}{DELTA4} {ROTATED4} would send ")
    assert len(advised(zero | {"zero_hpz_partition_size": "2"})) == 1  # groups, each with a reference
    half = zero | QWZ | {"zero_quantized_weights_format": "delta4"}  # int4 and rotated4 send as much
    for other, grid in (
        (half, NODES),
        (zero, NODE),
        ({"zero_stage": 3} | weights | QGZ, NODES),
        (FOUR_BITS, NODES),
    ):
        assert advised(other, grid) == []
    assert advised(zero, gibibytes=0.001) == []


def test_alternatives_of_held_codes_are_differences_that_a_node_can_apply_or_none() -> None:
    job = job_of(SMALL, 50304, zero=FOUR_BITS, precision=HELD, nodes=2, local=4)
    plans = zeropp_plans(job, rates(10))
    assert [plan.job.zero.hpz for plan in plans if plan.job.zero.zero_quantized_weights] == [True, True]
    assert len(plans) == 6
    plain = job_of(SMALL, 50304, zero=FOUR_BITS, nodes=2, local=4)
    for stage in (1, 2, 3):
        zero = at_stage(at_stage(job, stage), 3).zero  # hpZ is lost below stage 3
        assert zero.zero_quantized_weights == zero.hpz == (stage == 3)
        assert at_stage(at_stage(plain, stage), 3).zero.zero_quantized_weights
        assert at_stage(job, stage).zero.sends_differences
