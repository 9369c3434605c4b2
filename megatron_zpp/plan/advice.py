"""Compares the plan with plans of other stages and ZeRO++ options: which of them pay."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.plan.changes import changes
from megatron_zpp.plan.hardware import Machine
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import Memory, memory_of
from megatron_zpp.plan.step_time import StepTime, step_time
from megatron_zpp.plan.traffic import SentBytes, total, traffic_of

WORTH = 0.01  # of a step's time: the model is not accurate enough for smaller differences
_WEIGHTS, _HPZ = "zero_quantized_weights", "zero_hpz_partition_size"
_GRADIENTS, _ACCUMULATE = "zero_quantized_gradients", "zero_gradient_partition_size"
_OPTIONS = (_WEIGHTS, _HPZ, _GRADIENTS, _ACCUMULATE)


@dataclass(frozen=True)
class Plan:
    """One setting and its predictions."""

    name: str
    job: Job
    memory: Memory
    sent: SentBytes
    time: StepTime

    def fits(self, gibibytes: float) -> bool:
        """Whether it fits a GPU of this memory."""
        return self.memory.fits(gibibytes)


def plan_of(name: str, job: Job, machine: Machine) -> Plan:
    """All predictions for one setting."""
    passes = traffic_of(job)
    return Plan(name, job, memory_of(job), total(passes), step_time(job, machine, passes))


def zeropp_plans(job: Job, machine: Machine) -> list[Plan]:
    """Plans of the run's stage with every subset of ZeRO++'s options, small ones first; stage 0 has none.

    A plan is named by its options, and by what else it changes in the run's flags.
    """
    options = [name for name in _OPTIONS if _means_something(name, job)]
    sets = [chosen for count in range(len(options) + 1) for chosen in itertools.combinations(options, count)]
    plans = []
    for chosen in sets:
        alternative = _with(job, *(name in chosen for name in _OPTIONS))
        if _WEIGHTS in chosen and not alternative.zero.zero_quantized_weights:
            continue  # it would be refused with these
        change = changes(job, alternative, chosen)
        name = change if chosen else f"none of them ({change})" if change else "none of them"
        plans.append(plan_of(name, alternative, machine))
    return plans


def options_on(zero: ZeroConfig) -> tuple[bool, ...]:
    """Which of ZeRO++'s options a run has: weights, hpZ, gradients, accumulation in groups."""
    return zero.zero_quantized_weights, zero.hpz, zero.zero_quantized_gradients, accumulates(zero)


def _means_something(option: str, job: Job) -> bool:
    """Whether an option of ZeRO++ has an effect in this job."""
    if option == _HPZ:
        return job.zero.zero_stage == 3
    if option == _WEIGHTS and job.precision.fp8_param_gather:
        return job.zero.sends_differences  # other formats are refused
    if option == _ACCUMULATE:
        return job.zero.zero_stage >= 2 and job.nodes > 1 and job.micro_batches > 1
    return job.zero.zero_stage >= 1


def advice_of(job: Job, gibibytes: float) -> list[str]:
    """Lines that recommend options which send less between nodes and fit the memory."""
    lines = []
    for changed in (_accumulating(job), _with_differences(job)):
        before, after = memory_of(job), memory_of(changed)
        sent, less = (total(traffic_of(each)).inter / job.nodes / 1e9 for each in (job, changed))
        if after.fits(gibibytes) and less < (1 - WORTH) * sent:
            lines.append(
                f"{changes(job, changed)} would send {less:.3g} GB per step from each node instead of "
                f"{sent:.3g}, for {max(after.peak - before.peak, 0) / 2**30:.2f} GiB more on each GPU"
            )
    return lines


def _accumulating(job: Job) -> Job:
    """The job with gradients that cross nodes once per step; as it is where they do, or where none cross."""
    if accumulates(job.zero) or not _means_something(_ACCUMULATE, job):
        return job
    zero = dataclasses.replace(job.zero, zero_gradient_partition_size="auto")
    return dataclasses.replace(job, zero=zero)


def _with_differences(job: Job) -> Job:
    """The job with delta4 and rotated4, if all of ZeRO++ is on and groups of every node can keep the weights.

    Weights that are held as codes have no other format, and none where they cross nodes as they are.
    """
    zero = job.zero
    on = zero.zero_quantized_weights or job.precision.fp8_param_gather
    if job.nodes == 1 or not (
        on and zero.zero_quantized_gradients and zero.holds_references(job.mesh.local_ranks)
    ):
        return job
    if not zero.sends_differences:
        zero = dataclasses.replace(zero, zero_quantized_weights=True, zero_quantized_weights_format="delta4")
    if not zero.rotates_gradients:
        zero = dataclasses.replace(zero, zero_quantized_gradients_format="rotated4")
    return dataclasses.replace(job, zero=zero)


def least_that_pays(plans: list[Plan], gibibytes: float) -> Plan:
    """The plan of `zeropp_plans` with the fewest options that is as fast as any plan that fits.

    If none fits, as fast as any plan at all.
    """
    fitting = [plan for plan in plans if plan.fits(gibibytes)] or plans
    fastest = min(plan.time.seconds for plan in fitting)
    return next(plan for plan in fitting if plan.time.seconds <= (1 + WORTH) * fastest)


def at_stage(job: Job, stage: int) -> Job:
    """The job at another stage, with the options of ZeRO++ that this stage allows."""
    zero = job.zero
    chosen = [given and stage >= least for given, least in zip(options_on(zero), (1, 3, 1, 1), strict=True)]
    plain = dataclasses.replace(_plain(zero), zero_stage=stage, zero_prefetch_units=None)
    if stage == 3 and zero.zero_stage == 3:
        plain = dataclasses.replace(plain, zero_prefetch_units=zero.zero_prefetch_units)
    return dataclasses.replace(job, zero=_options(plain, job, *chosen))


def _with(job: Job, weights: bool, hpz: bool, gradients: bool, accumulate: bool) -> Job:
    precision = job.precision
    if gradients:
        precision = dataclasses.replace(precision, grad_reduce_in_bf16=False)
    zero = _options(_plain(job.zero), job, weights, hpz, gradients, accumulate)
    return dataclasses.replace(job, zero=zero, precision=precision)


def _plain(zero: ZeroConfig) -> ZeroConfig:
    """The configuration without ZeRO++'s options."""
    return ZeroConfig(
        zero_stage=zero.zero_stage,
        zero_offload_optimizer=zero.zero_offload_optimizer,
        zero_prefetch_units=zero.zero_prefetch_units,
        zero_unit=zero.zero_unit,
        zero_table_rows=zero.zero_table_rows,
    )


def accumulates(zero: ZeroConfig) -> bool:
    """Whether gradients are accumulated in groups of ranks."""
    return zero.zero_gradient_partition_size != "off"


def _options(
    plain: ZeroConfig, job: Job, weights: bool, hpz: bool, gradients: bool, accumulate: bool
) -> ZeroConfig:
    """`plain` with some of ZeRO++'s options, in the formats of `job`.

    Where differences would be refused, weights travel in the default format, or as the codes that they are.
    """
    settings: dict[str, Any] = {}
    given = job.zero
    differences = given.sends_differences and (hpz or plain.zero_stage < 3)
    weights = weights and (differences or not job.precision.fp8_param_gather)
    if weights:
        settings["zero_quantized_weights"] = True
        if differences or not given.sends_differences:
            settings["zero_quantized_weights_format"] = given.zero_quantized_weights_format
    if hpz:
        settings["zero_hpz_partition_size"] = given.zero_hpz_partition_size if given.hpz else "auto"
    if gradients:
        settings["zero_quantized_gradients"] = True
        settings["zero_quantized_gradients_format"] = given.zero_quantized_gradients_format
    if accumulate:
        size = given.zero_gradient_partition_size
        settings["zero_gradient_partition_size"] = size if accumulates(given) else "auto"
    return dataclasses.replace(plain, **settings)
