"""Bytes that all ranks together send in a step, by link, exactly as their ledgers will count them.

What tensor ranks exchange is not among them: plan/exchanges.py has it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megatron_zpp.plan.gathers import GatherCounts, gathers_of
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.hop import SentBytes


@dataclass(frozen=True)
class Pass:
    """The transfers beside a forward or a backward, which a step repeats `times` times."""

    forward: bool
    times: int
    gathered: SentBytes
    reduced: SentBytes
    alone: SentBytes  # of `reduced`: the last unit's reduction, with which no compute overlaps
    decoded: int  # elements of quantised weights that each rank decodes
    cast: int  # elements of fp32 references that each rank casts, so that its node gathers them
    summed: int  # elements of gradients that a backward makes on each rank

    @property
    def sent(self) -> SentBytes:
        """Bytes of one such pass."""
        return self.gathered + self.reduced


def traffic_of(job: Job) -> list[Pass]:
    """The passes of one optimizer step in the middle of a run."""
    passes = []
    plan, walked = job.communication, gathers_of(job)
    early, units = _early_reductions(job), Counter(job.layouts)
    for one in walked:
        last = one.micro_batch == walked[-1].micro_batch
        passes.append(
            Pass(
                forward=one.forward,
                times=one.times,
                gathered=_gathers(job, one.gathered),
                reduced=SentBytes()
                if one.forward
                else _reductions(job, early, False) + _reductions(job, units, last),
                alone=SentBytes() if one.forward else _reductions(job, Counter(job.layouts[:1]), last),
                decoded=_decoded(plan, one.gathered),
                cast=_cast(plan, one.gathered),
                summed=0 if one.forward else sum(layout.numel for layout in job.layouts),
            )
        )
    return passes


def total(passes: list[Pass]) -> SentBytes:
    """Bytes of the whole step: `intra_node_bytes` and `inter_node_bytes` of metrics.jsonl."""
    return sum((one.sent * one.times for one in passes), SentBytes())


def _early_reductions(job: Job) -> Counter[FlatLayout]:
    """Units whose gradients a backward reduces place by place, without the last place."""
    early: Counter[FlatLayout] = Counter()
    for unit, layout in enumerate(job.layouts):
        early[layout] += job.communication.reductions(unit) - 1
    return +early


def _reductions(job: Job, units: Counter[FlatLayout], last: bool) -> SentBytes:
    """Bytes that all ranks send to reduce these units in one micro-batch, a step's `last` or another one."""
    return _by_all_ranks(
        job, units, lambda plan, unit: plan.reduction.bytes_sent(unit, job.micro_batches, last=last)
    )


def _gathers(job: Job, gathered: GatherCounts) -> SentBytes:
    """Bytes that all ranks send for these gathers."""
    sent = _by_all_ranks(job, gathered.world, lambda plan, unit: plan.gather_bytes_sent(unit))
    return sent + _by_all_ranks(
        job, gathered.secondary, lambda plan, unit: plan.secondary_gather.bytes_sent(unit)
    )


def _by_all_ranks(
    job: Job, units: Counter[FlatLayout], sent: Callable[[CommunicationPlan, FlatLayout], SentBytes]
) -> SentBytes:
    of_a_node = (sent(plan, unit) * times for plan in job.node_communication for unit, times in units.items())
    return sum(of_a_node, SentBytes()) * (job.nodes * job.tensor)


def _decoded(plan: CommunicationPlan, gathered: GatherCounts) -> int:
    """Elements that a rank decodes."""
    return sum(plan.gather_decodes(unit) * times for unit, times in gathered.world.items())


def _cast(plan: CommunicationPlan, gathered: GatherCounts) -> int:
    """Elements that a rank casts: its part of the reference, in every gather."""
    if plan.difference_format is None:
        return 0
    every = gathered.world + gathered.secondary
    return sum(len(plan.reference_elements(unit)) * times for unit, times in every.items())
