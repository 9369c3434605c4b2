"""Compares the plan with plans of other stages and ZeRO++ options: which of them pay."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.plan.changes import Changes, changes
from megatron_zpp.plan.hardware import USABLE, Machine
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import Memory, memory_of
from megatron_zpp.plan.step_time import StepTime, step_time
from megatron_zpp.plan.traffic import SentBytes, total, traffic_of

WORTH = 0.01  # of a step's time: the model is not accurate enough for smaller differences
HPZ, _WEIGHTS = "--zero-hpz-partition-size", "--zero-quantized-weights"
ACCUMULATE = "--zero-gradient-partition-size"
_OPTIONS = (_WEIGHTS, HPZ, "--zero-quantized-gradients", ACCUMULATE)
EVERYTHING = "all of them"
_FIELDS = {flag: flag.removeprefix("--").replace("-", "_") for flag in _OPTIONS}


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
        return fits(self.memory, gibibytes)


def fits(memory: Memory, gibibytes: float) -> bool:
    """Whether the peak leaves enough of a GPU's `gibibytes` for what a plan does not count."""
    return memory.peak <= USABLE * gibibytes * 2**30


def plan_of(name: str, job: Job, machine: Machine) -> Plan:
    """All predictions for one setting."""
    passes = traffic_of(job)
    return Plan(name, job, memory_of(job), total(passes), step_time(job, machine, passes))


def zeropp_plans(job: Job, machine: Machine) -> list[Plan]:
    """Plans of the run's stage with every subset of ZeRO++'s options, small ones first; stage 0 has none."""
    options = tuple(flag for flag in _OPTIONS if _means_something(flag, job))
    sets = [chosen for count in range(len(options) + 1) for chosen in itertools.combinations(options, count)]
    plans = []
    for chosen in sets:
        alternative = _with(job, *(flag in chosen for flag in _OPTIONS))
        if _WEIGHTS in chosen and not alternative.zero.zero_quantized_weights:
            continue  # it would be refused with these
        name = EVERYTHING if chosen and chosen == options else " ".join(chosen) or "none of them"
        plans.append(plan_of(name, alternative, machine))
    return plans


def options_of(plan: Plan, run: Job) -> Changes:
    """The options of ZeRO++ of a plan of `zeropp_plans`, and what else it changes in the run's flags."""
    zero = plan.job.zero
    on = (zero.zero_quantized_weights, zero.hpz, zero.zero_quantized_gradients, accumulates(zero))
    return changes(run, plan.job, tuple(_FIELDS[flag] for flag, has in zip(_OPTIONS, on, strict=True) if has))


def _means_something(flag: str, job: Job) -> bool:
    """Whether an option of ZeRO++ has an effect in this job."""
    if flag == HPZ:
        return job.zero.zero_stage == 3
    if flag == _WEIGHTS and job.precision.fp8_param_gather:
        return job.zero.sends_differences  # other formats are refused
    if flag == ACCUMULATE:
        return job.zero.zero_stage >= 2 and job.nodes > 1 and job.micro_batches > 1
    return job.zero.zero_stage >= 1


def advice_of(job: Job, gibibytes: float) -> list[str]:
    """Lines that recommend options which send less between nodes and fit the memory."""
    advised = (accumulation_advice(job, gibibytes), difference_advice(job, gibibytes))
    return [advice for advice in advised if advice is not None]


def difference_advice(job: Job, gibibytes: float) -> str | None:
    """A line that recommends delta4 and rotated4; None if they do not apply, help or fit.

    They apply if all of ZeRO++ is on and the groups of every node can keep the weights. Weights that are held
    as codes have no other format, and none where they cross nodes as they are.
    """
    zero = job.zero
    holds_references = zero.holds_references(job.data_local)
    on = zero.zero_quantized_weights or job.precision.fp8_param_gather
    if job.nodes == 1 or not (on and zero.zero_quantized_gradients and holds_references):
        return None
    if zero.sends_differences and zero.rotates_gradients:
        return None
    flags, changed = [], zero
    if not zero.sends_differences:
        format = "--zero-quantized-weights-format delta4"
        flags.append(format if zero.zero_quantized_weights else f"{_WEIGHTS} {format}")
        changed = dataclasses.replace(
            changed, zero_quantized_weights=True, zero_quantized_weights_format="delta4"
        )
    if not zero.rotates_gradients:
        flags.append("--zero-quantized-gradients-format rotated4")
        changed = dataclasses.replace(changed, zero_quantized_gradients_format="rotated4")
    return _sends_less(" and ".join(flags), job, dataclasses.replace(job, zero=changed), gibibytes)


def accumulation_advice(job: Job, gibibytes: float) -> str | None:
    """A line that recommends --zero-gradient-partition-size auto; None if it does not pay or fit.

    It pays if gradients cross the link between nodes after every micro-batch.
    """
    if job.zero.zero_gradient_partition_size != "off" or not _means_something(ACCUMULATE, job):
        return None
    zero = dataclasses.replace(job.zero, zero_gradient_partition_size="auto")
    changed = dataclasses.replace(job, zero=zero)
    return _sends_less(f"{ACCUMULATE} auto", job, changed, gibibytes)


def _sends_less(flags: str, job: Job, changed: Job, gibibytes: float) -> str | None:
    """What the flags of `changed` save and cost; None if nothing is saved, or if it would not fit."""
    before, after = memory_of(job), memory_of(changed)
    sent, less = (total(traffic_of(each)).inter / job.nodes / 1e9 for each in (job, changed))
    if not fits(after, gibibytes) or less >= (1 - WORTH) * sent:
        return None
    return (
        f"{flags} would send {less:.3g} GB per step from each node instead of {sent:.3g}, for "
        f"{max(after.peak - before.peak, 0) / 2**30:.2f} GiB more on each GPU"
    )


def least_that_pays(plans: list[Plan], gibibytes: float) -> Plan:
    """The plan of `zeropp_plans` with the fewest options that is as fast as any plan that fits.

    If none fits, as fast as any plan at all.
    """
    fitting = [plan for plan in plans if plan.fits(gibibytes)] or plans
    fastest = min(plan.time.seconds for plan in fitting)
    return next(plan for plan in fitting if plan.time.seconds <= (1 + WORTH) * fastest)


def why(plain: Plan, plan: Plan, gibibytes: float) -> str:
    """Whether options shorten a step on GPUs of this memory, and why, in words."""
    before, after = plain.time.seconds, plan.time.seconds
    waits = f"{_milliseconds(plan.time.exposed)}, not {_milliseconds(plain.time.exposed)} ms"
    if before - after > WORTH * before:
        return f"pays: waits for links {waits}" if plan.fits(gibibytes) else "would pay, but does not fit"
    if plain.time.exposed <= WORTH * before:
        costs = f", costs {_milliseconds(after - before)} ms" if after > (1 + WORTH) * before else ""
        return f"does not pay: the compute hides all that is sent{costs}"
    return f"does not pay: waits for links {waits}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def at_stage(job: Job, stage: int) -> Job:
    """The job at another stage, with the options of ZeRO++ that this stage allows."""
    zero = job.zero
    options = (zero.zero_quantized_weights, zero.hpz, zero.zero_quantized_gradients, accumulates(zero))
    chosen = [given and stage >= least for given, least in zip(options, (1, 3, 1, 1), strict=True)]
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


def without_hpz(job: Job) -> Job:
    """The job without secondary shards, and without the options that need them."""
    zero = job.zero
    return _with(job, zero.zero_quantized_weights, False, zero.zero_quantized_gradients, accumulates(zero))


def without_accumulation(job: Job) -> Job:
    """The job that reduces gradients over all ranks after every micro-batch."""
    return dataclasses.replace(job, zero=dataclasses.replace(job.zero, zero_gradient_partition_size="off"))
