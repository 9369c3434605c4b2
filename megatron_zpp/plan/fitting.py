"""Which settings take less memory: what would make a run fit, and what fits and is faster."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from megatron_zpp.config.model import RecomputeConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.plan.advice import (
    WORTH,
    Plan,
    at_stage,
    plan_of,
)
from megatron_zpp.plan.changes import changes
from megatron_zpp.plan.hardware import Machine
from megatron_zpp.plan.job import Job, units_of

_MULTIPLE = 64  # rows of a block: whole tiles of matrix products
_Change = Callable[[Job], Job]


def ways_to_fit(job: Job, machine: Machine) -> Iterator[Plan]:
    """Plans that take less memory: each change alone, then the furthest value of all of them together.

    A plan is named by the flags that its change gives and omits.
    """
    higher = range(job.zero.zero_stage + 1, 4) if job.mesh.data_ranks > 1 else range(0)
    stages: list[_Change] = [partial(at_stage, stage=stage) for stage in higher]
    micro_batches: list[_Change] = [
        partial(_in_micro_batches_of, size=size)
        for size in _halves(job.micro_batch_size)
        if job.may_have_samples(size)
    ]
    others = list(_other_changes(job))
    for change in (*stages, *micro_batches, *others):
        changed = change(job)
        yield plan_of(changes(job, changed), changed, machine)
    furthest = [*stages[-1:], *micro_batches[-1:], *others]
    if len(furthest) > 1:
        together = job
        for change in furthest:
            together = change(together)
        yield plan_of("all of these", together, machine)


def _other_changes(job: Job) -> Iterator[_Change]:
    """The changes of flags that have one value which takes less memory."""
    if _can_cut(job):
        yield _in_sublayers
    if rows := suggested_rows(job):
        yield partial(in_row_blocks, rows=rows)
    if job.recompute.recompute_granularity != "full":
        yield _recomputed
    if _can_offload(job):
        yield _offloaded


def faster_stage(plan: Plan, machine: Machine, gibibytes: float) -> Plan | None:
    """The fastest plan of another stage that fits, named by flags; None if it is not faster than `plan`."""
    job = plan.job
    stages = [stage for stage in range(4) if stage != job.zero.zero_stage] if job.mesh.data_ranks > 1 else []
    jobs = [at_stage(job, stage) for stage in stages]
    others = [plan_of(changes(job, other), other, machine) for other in jobs]
    fitting = [other for other in others if other.fits(gibibytes)]
    best = min(fitting, key=lambda other: other.time.seconds, default=None)
    return best if best and best.time.seconds < (1 - WORTH) * plan.time.seconds else None


def suggested_rows(job: Job) -> int | None:
    """Rows of blocks whose units are as large as a third of a layer; None for tables that are best whole.

    Those are tables smaller than a layer, and tables that are in blocks already, that tensor ranks share or
    that 8-bit products multiply.
    Blocks are equal if fewer than twice as many can be.
    """
    entries, width = job.padded_vocab_size, job.model.hidden_size
    layer = sum(each.numel for layout in job.layer_layouts for each in layout.placements)
    whole = job.tensor > 1 or job.precision.fp8_output_layer
    if whole or job.zero.zero_table_rows is not None or entries * width <= layer:
        return None
    fewest = -(-3 * entries * width // layer)
    equal = (blocks for blocks in range(fewest, 2 * fewest) if entries % (blocks * _MULTIPLE) == 0)
    rows = -(-entries // next(equal, fewest))
    return -(-rows // _MULTIPLE) * _MULTIPLE


def in_row_blocks(job: Job, rows: int) -> Job:
    """The job with tables in blocks of so many rows."""
    return _with_units(job, dataclasses.replace(job.zero, zero_table_rows=rows))


def _halves(size: int) -> Iterator[int]:
    """The sizes that follow from halving while the size divides."""
    while size % 2 == 0:
        size //= 2
        yield size


def _in_micro_batches_of(job: Job, size: int) -> Job:
    count = job.micro_batches * job.micro_batch_size // size
    return dataclasses.replace(job, micro_batch_size=size, micro_batches=count)


def _recomputed(job: Job) -> Job:
    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
    return dataclasses.replace(job, recompute=full)


def _can_cut(job: Job) -> bool:
    """Whether the run could have units of sublayers and has not."""
    return not job.zero.cuts_layers


def _can_offload(job: Job) -> bool:
    """Whether the run could have its optimizer on the CPU and has not."""
    return job.may_offload and not job.zero.zero_offload_optimizer


def _in_sublayers(job: Job) -> Job:
    return _with_units(job, dataclasses.replace(job.zero, zero_unit="sublayer"))


def _with_units(job: Job, zero: ZeroConfig) -> Job:
    """The job with the units of `zero`."""
    units = units_of(
        job.model, job.vocab_size, job.tensor, cut_layers=zero.cuts_layers, table_rows=zero.zero_table_rows
    )
    return dataclasses.replace(job, zero=zero, units=units)


def _offloaded(job: Job) -> Job:
    return dataclasses.replace(job, zero=dataclasses.replace(job.zero, zero_offload_optimizer=True))
