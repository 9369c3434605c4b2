"""Bytes that a step sends, by link: what the ledgers of all ranks together will count, to the byte.

`Sent` is of all ranks together.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megatron_zpp.plan.gathers import Gathered, walk
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.hop import Sent


@dataclass(frozen=True)
class Pass:
    """What runs beside a forward or a backward that a step repeats `times` times."""

    forward: bool
    times: int
    gathered: Sent
    reduced: Sent
    alone: Sent  # of `reduced`: the last unit's, with no compute left to run behind
    decoded: int  # elements that each rank decodes from qwZ's codes
    summed: int  # elements of gradients that each rank takes out of the backward

    @property
    def sent(self) -> Sent:
        """In one of them."""
        return self.gathered + self.reduced


def traffic_of(job: Job) -> list[Pass]:
    """The passes of one optimizer step in the midst of a run."""
    passes = []
    plan, walked = job.communication, walk(job)
    units = Counter(job.layouts)
    for one in walked:
        last = one.micro_batch == walked[-1].micro_batch
        passes.append(
            Pass(
                forward=one.forward,
                times=one.times,
                gathered=_gathers(job, one.gathered),
                reduced=Sent() if one.forward else _reductions(job, units, last),
                alone=Sent() if one.forward else _reductions(job, Counter(job.layouts[:1]), last),
                decoded=_decoded(plan, one.gathered),
                summed=0 if one.forward else sum(layout.numel for layout in job.layouts),
            )
        )
    return passes


def total(passes: list[Pass]) -> Sent:
    """Of the whole step: `intra_node_bytes` and `inter_node_bytes` of metrics.jsonl."""
    return sum((one.sent * one.times for one in passes), Sent())


def _reductions(job: Job, units: Counter[FlatLayout], last: bool) -> Sent:
    """What a micro-batch, a step's `last` or another one, sends to reduce these units, by all ranks."""
    return _by_all_ranks(
        job, units, lambda plan, unit: plan.reduction.sent(unit, job.micro_batches, last=last)
    )


def _gathers(job: Job, gathered: Gathered) -> Sent:
    """By all ranks."""
    sent = _by_all_ranks(job, gathered.world, lambda plan, unit: plan.gather_sent(unit))
    return sent + _by_all_ranks(job, gathered.secondary, lambda plan, unit: plan.secondary.sent(unit))


def _by_all_ranks(
    job: Job, units: Counter[FlatLayout], sent: Callable[[CommunicationPlan, FlatLayout], Sent]
) -> Sent:
    of_a_node = (sent(plan, unit) * times for plan in job.node_communication for unit, times in units.items())
    return sum(of_a_node, Sent()) * job.nodes


def _decoded(plan: CommunicationPlan, gathered: Gathered) -> int:
    """Elements that a rank decodes."""
    decoded = sum(plan.gather_decodes(unit) * times for unit, times in gathered.world.items())
    if plan.secondary is not None and plan.secondary.hop.quant_format is not None:
        decoded += sum(unit.numel * times for unit, times in gathered.secondary.items())
    return decoded
