"""When a plan takes tensor ranks instead of ranks with whole layers, and when it does not."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.plan_rows import h100
from benchmarks.plan_tensor import fitted_h100, zero_3
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.checks import check_routes
from megatron_zpp.plan.advice import Plan, least_that_pays, plan_of
from megatron_zpp.plan.exchanges import waiting_seconds
from megatron_zpp.plan.hardware import TENSOR_SLOWDOWN, Machine, machine
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.step_time import compute_seconds
from megatron_zpp.plan.tensor_parallel import at_tensor, tensor_lines, tensor_plans
from tests.plan.jobs import FULL, NO_DROPOUT, QGZ, QWZ, job_of

GPU = 79.0  # GiB
STAGE_3 = {"zero_stage": 3}
NODES = {"nodes": 16, "local": 8}


def rates(link: float = 400) -> Machine:
    config = PlanConfig(dry_run=True, plan_gpu="h100", plan_link_gbit=link)
    return machine(config, "bfloat16")


def model(preset: str, **changes: Any) -> ModelConfig:
    return ModelConfig(model_preset=preset, **NO_DROPOUT, **changes)


def planned(job: Job, gpu: Machine | None = None) -> tuple[list[Plan], Plan]:
    """All plans, and the one to take."""
    gpu = gpu or rates()
    plans = tensor_plans(plan_of("this run", job, gpu), gpu, GPU)
    return plans, least_that_pays(plans, GPU)


def test_tensor_ranks_do_not_pay_where_whole_layers_fit_and_nothing_waits() -> None:
    job = job_of(model("1.3b"), 50304, zero=STAGE_3, local=8, micro_batch_size=8)
    plans, best = planned(job)
    assert {plan.job.tensor for plan in plans} == {1, 2, 4, 8}
    assert best.job.tensor == 1
    assert not list(tensor_lines(plan_of("", job, rates()), rates(), GPU))


@pytest.mark.parametrize("overlapped", [False, True])
def test_tensor_ranks_do_not_pay_on_the_two_h100s_where_zero_3_was_measured_to_be_as_fast(
    overlapped: bool,
) -> None:
    """6.7B at sequence 2048: 332 ms with ZeRO-3 and 336 with T = 2, whose GPUs are 1% slower alone."""
    job = replace(zero_3().job, overlapped=overlapped)
    for gpu in (h100(), fitted_h100(zero_3().alone)):
        plans, best = planned(job, gpu)
        assert [plan.name.split()[0] for plan in plans] == ["1", "2", "2"]
        assert all(plan.fits(GPU) for plan in plans[:2])
        assert best.job.tensor == 1


def test_tensor_ranks_pay_where_the_activations_of_a_sample_do_not_fit() -> None:
    long = model("175b", seq_length=65536)
    job = job_of(long, 50304, zero=STAGE_3, recompute=FULL, **NODES)
    plans, best = planned(job)
    by_size = {plan.job.tensor: plan for plan in plans}
    assert [by_size[size].fits(GPU) for size in (1, 8)] == [False, True]
    assert best is by_size[8]
    *_, last = tensor_lines(plan_of("", job, rates()), rates(), GPU)
    assert last == "  take --tensor-model-parallel-size 8"
    assert all(plan.job.samples_per_step == job.samples_per_step for plan in plans)


def test_tensor_ranks_pay_where_the_global_batch_is_smaller_than_the_job() -> None:
    """32 samples for 128 ranks: whole layers, and pairs of ranks, would have less than one each."""
    job = job_of(model("13b"), 50304, zero=STAGE_3, recompute=FULL, tensor=8, micro_batch_size=2, **NODES)
    plans, best = planned(job)
    assert {plan.job.tensor for plan in plans} == {4, 8}
    assert best.fits(GPU)


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (2, {"zero_stage": 2, "zero_quantized_weights_format": "delta4"} | QWZ),  # at stage 3 it needs hpZ
        (1, {"zero_hpz_partition_size": "4", "zero_gradient_partition_size": "4"}),
        (
            8,
            {"zero_quantized_weights_format": "delta4"} | QWZ,
        ),  # the only data rank of a node has all weights
    ],
)
def test_the_flags_of_a_plan_change_groups_that_its_data_ranks_cannot_have(
    tensor: int, options: dict[str, Any]
) -> None:
    """A node of 8 ranks has 2 data ranks of 4, so groups of 4 would be refused; so is hpZ at stage 2."""
    zero = STAGE_3 | options
    job = job_of(model("1.3b"), 50304, zero=zero, micro_batches=16, tensor=tensor, **NODES)
    plans, _ = planned(job)
    assert {plan.job.tensor for plan in plans} == {1, 2, 4, 8}
    for plan in plans:
        size, *flags = plan.name.split()
        given = {
            flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)
        }
        stage = int(given.pop("zero_stage", zero["zero_stage"]))
        given.pop("micro_batch_size", None)
        obeyed = ZeroConfig(**zero | given | {"zero_stage": stage})
        check_routes(obeyed, Topology(0, 128, 0, 8).mesh(int(size)))
        assert obeyed == plan.job.zero


def test_tensor_ranks_let_a_lower_stage_fit_that_sends_less_between_nodes() -> None:
    """At stage 2 weights are gathered once per step; 175B in 16 bits are 41 GiB for each of eight ranks."""
    job = job_of(model("175b"), 50257, zero=STAGE_3, recompute=FULL, nodes=128, local=8, micro_batches=2)
    plans, best = planned(job)
    plain = plans[0]
    assert best.name == "8 --zero-stage 2 --micro-batch-size 8"
    assert plain.fits(GPU)
    assert best.fits(GPU)
    assert best.sent.inter < 0.4 * plain.sent.inter


def test_groups_of_zeropp_that_do_not_fit_the_data_ranks_become_whole_nodes() -> None:
    zero = STAGE_3 | QWZ | QGZ | {"zero_hpz_partition_size": "8", "zero_gradient_partition_size": "4"}
    job = job_of(model("1.3b"), 50304, zero=zero, nodes=2, local=8, micro_batches=2)
    shared = at_tensor(job, 4)[0].zero
    assert (shared.zero_hpz_partition_size, shared.zero_gradient_partition_size) == ("auto", "auto")
    assert at_tensor(job, 1)[0].zero == job.zero


@pytest.mark.parametrize("size", [2, 8])
def test_time_is_divided_products_and_the_wait_for_activations(size: int) -> None:
    """Of 6.7B: 4 collectives per layer in a forward, 2 in a backward, and 2 of embedding and head."""
    job = job_of(model("6.7b"), 50304, local=size, tensor=size)
    alone = job_of(model("6.7b"), 50304)
    for forward in (True, False):
        whole = compute_seconds(alone, rates(), forward)
        assert compute_seconds(job, rates(), forward) == pytest.approx(TENSOR_SLOWDOWN * whole / size)
    one = (size - 1) / size * 2 * 2048 * 4096  # bytes that a collective on hidden states sends
    replicated = 2048 * 4096 + 32 * (4 + 2) * 4096 + 2 * 4096  # positions, norms, biases after sums
    summed = 2 * (size - 1) / size * 4 * replicated
    for forward, sent in ((True, (4 * 32 + 2) * one), (False, (2 * 32 + 2) * one + summed)):
        assert waiting_seconds(job, rates(), forward) == pytest.approx(sent / rates().inside, rel=0.01)
