"""Plans of a run with other numbers of tensor ranks, and which of them to take.

All plans have the run's global batch. A data rank of T tensor ranks has T times the samples in a micro-batch,
so that a GPU has as many hidden states between linear maps and a step as many micro-batches, where sizes and
memory allow it, and fewer samples otherwise.
"""

import dataclasses
from collections.abc import Iterator

from torch import nn

from megatron_zpp.config.shapes.tensor_parallel import FLAG, check_tensor_ranks, check_vocabulary
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.checks import check_routes
from megatron_zpp.plan.advice import Plan, at_stage, least_that_pays, plan_of
from megatron_zpp.plan.changes import changes
from megatron_zpp.plan.exchanges import exchanged_bytes, hidden_state_bytes
from megatron_zpp.plan.hardware import TENSOR_SLOWDOWN, Machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.memory import memory_of

_GB, _GIB = 1e9, 2**30
_NAME = 40  # columns of the name of a row


def tensor_plans(plan: Plan, machine: Machine, gibibytes: float) -> list[Plan]:
    """The run with each possible number of tensor ranks, fewest first, named by the flag's value and changes.

    Other numbers than the run's take the largest micro-batches that fit. Whole layers are also planned at
    stage 3, which needs least memory, and tensor ranks of a run at stage 3 at stage 2 where that fits: it
    gathers once per step.
    """
    run, plans = plan.job, dict[str, Plan]()
    for size in range(1, run.local + 1):
        jobs = at_tensor(run, size)
        if not jobs:
            continue
        if size == run.tensor:
            plans[str(size)] = dataclasses.replace(plan, name=str(size))
        if size != run.tensor or not plan.fits(gibibytes):
            other = _largest_that_fits(jobs, run, machine, gibibytes)
            plans.setdefault(other.name, other)
        stage = 3 if size == 1 else 2
        if (run.zero.zero_stage < 3 if size == 1 else run.zero.zero_stage == 3) and run.ranks > 1:
            staged = [at_stage(job, stage) for job in jobs]
            other = _largest_that_fits(staged, run, machine, gibibytes)
            if size == 1 or other.fits(gibibytes):
                plans[other.name] = other
    return list(plans.values())


def _largest_that_fits(jobs: list[Job], run: Job, machine: Machine, gibibytes: float) -> Plan:
    """The first of `jobs` that fits, else the last."""
    fitting = (job for job in jobs if memory_of(job).fits(gibibytes))
    return _named(plan_of("", next(fitting, jobs[-1]), machine), run)


def _named(plan: Plan, run: Job) -> Plan:
    """The plan, named by the value of FLAG and the flags that it changes in the run's command line."""
    return dataclasses.replace(plan, name=f"{plan.job.tensor} {changes(run, plan.job)}".rstrip())


def at_tensor(job: Job, size: int) -> list[Job]:
    """The job with `size` tensor ranks and ever smaller micro-batches.

    There are none if so many ranks cannot share the layers or the global batch.
    """
    if not _divides(job, size) or job.samples_per_step % (job.ranks // size):
        return []
    samples = job.samples_per_step // (job.ranks // size)
    zero = _zero_of(job, size)
    units = job.units if size == job.tensor else _units_of(job, size, zero.zero_table_rows)
    shared = dataclasses.replace(job, tensor=size, units=units, zero=zero)
    most = max(1, job.micro_batch_size * size // job.tensor)
    sizes = [
        one for one in range(1, min(most, samples) + 1) if samples % one == 0 and job.may_have_samples(one)
    ]
    return [
        dataclasses.replace(shared, micro_batch_size=one, micro_batches=samples // one)
        for one in reversed(sizes)
    ]


def _units_of(job: Job, size: int, rows: int | None) -> list[tuple[str, nn.Module]]:
    cut = job.zero.cuts_layers
    return units_of(job.model, job.vocab_size, size, cut_layers=cut, table_rows=rows)


def _divides(job: Job, size: int) -> bool:
    """Whether `size` ranks of a node can share each layer, and a run with so many is not refused."""
    try:
        check_tensor_ranks(job.model, size, fp8=job.precision.fp8)
        check_vocabulary(job.model, job.vocab_size, size)
        job.precision.check_vocabulary(job.padded_vocab_size, size)
    except ValueError:
        return False
    return job.local % size == 0


def _zero_of(job: Job, size: int) -> ZeroConfig:
    """The run's ZeRO++ groups, or whole nodes if data ranks cannot be in groups of that size.

    Tables are whole where tensor ranks do not divide the rows of a block.
    """
    divides = (job.zero.zero_table_rows or 0) % size == 0
    zero = job.zero if divides else dataclasses.replace(job.zero, zero_table_rows=None)
    try:
        check_routes(zero, dataclasses.replace(job, tensor=size).mesh)
    except ValueError:
        gradients = zero.zero_gradient_partition_size
        grouped = zero.hpz or (zero.sends_differences and zero.zero_stage == 3)
        return dataclasses.replace(
            zero,
            zero_hpz_partition_size="auto" if grouped else zero.zero_hpz_partition_size,
            zero_gradient_partition_size="off" if gradients == "off" else "auto",
        )
    return zero


def tensor_lines(plan: Plan, machine: Machine, gibibytes: float) -> Iterator[str]:
    """A table of all plans, and which to take, if the run has tensor ranks or they pay."""
    plans = tensor_plans(plan, machine, gibibytes)
    best = least_that_pays(plans, gibibytes)
    if plan.job.tensor == 1 and (best.job.tensor == 1 or not best.fits(gibibytes)):
        return
    figures = f"{'ms per step':>12}{'GB per node':>13}{'GiB':>8}"
    yield f"{'tensor ranks, same batch':{_NAME + 2}}{figures}  micro-batches"
    for other in plans:
        yield _row(other, plan.job, gibibytes)
    if best.fits(gibibytes):
        yield f"  take {FLAG} {best.name}"
    else:
        yield "  none of these fits"


def _row(other: Plan, run: Job, gibibytes: float) -> str:
    job, time = other.job, other.time
    figures = f"{1e3 * time.seconds:12,.1f}{other.sent.inter / job.nodes / _GB:13.3f}"
    mark, fits = "*" if job is run else " ", " " if other.fits(gibibytes) else "!"
    name = other.name if len(other.name) < _NAME else f"{other.name}\n  {'':{_NAME}}"  # figures below it
    line = f"{mark} {name:{_NAME}}{figures}{other.memory.peak / _GIB:8.2f}{fits} "
    line += f"{job.micro_batches} × {job.micro_batch_size}"
    if job.tensor > 1:
        line += f", {exchanged_bytes(job) / _GB:,.1f} GB inside, waits {1e3 * time.exchanges:,.1f} ms"
    return line


def exchange_line(job: Job) -> str:
    """Hidden states that tensor ranks send each other in a step, a part of `intra_node_bytes`."""
    nbytes = hidden_state_bytes(job)
    return f"    activations    {nbytes * job.ranks:>20,}   {nbytes / _GB:10.3f} GB from each GPU of these"


def assumption_lines(job: Job) -> Iterator[str]:
    """What a plan of tensor ranks assumes."""
    share = f"1/{job.tensor} of the compute takes {TENSOR_SLOWDOWN:g} × as long as 1/{job.tensor} of its time"
    yield f"  {share}, as on two H100s that share 6.7B"
    if job.overlapped:
        yield "  activations of linear maps travel beside products, by copies between GPUs"
    else:
        yield "  tensor ranks wait for activations, except for those sent beside products of the backward"
