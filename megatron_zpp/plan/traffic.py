"""Bytes that all ranks together send in a step, by link, exactly as their ledgers will count them.

Gathers are counted pass by pass, by running the engine's Prefetcher without tensors. So what slots still
hold, what is gathered ahead and what recomputation needs are as in a run, for any stage, prefetch and
recomputation. What tensor ranks exchange is not among the bytes: plan/exchanges.py has it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.prefetch import Phase, Prefetcher
from megatron_zpp.zero.unit_plan import UnitPlan

_DIFFERENT = 3  # micro-batches whose gathers may differ: the first, one for all others, the last


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


@dataclass
class _Gathers:
    """How many times one pass fills slots and brings what is kept, by unit."""

    filled: Counter[int] = field(default_factory=Counter)
    brought: Counter[int] = field(default_factory=Counter)


def traffic_of(job: Job) -> list[Pass]:
    """The passes of one optimizer step in the middle of a run."""
    walked = min(job.micro_batches, _DIFFERENT)
    order = [(forward, index) for index in range(walked) for forward in (True, False)]
    plan, none = job.communication, SentBytes()
    units = Counter(range(len(plan.units)))
    passes = []
    for (forward, index), gathers in zip(order, _gathers_of(job, order), strict=True):
        last = index == walked - 1
        between = walked == _DIFFERENT and index == 1
        passes.append(
            Pass(
                forward=forward,
                times=job.micro_batches - walked + 1 if between else 1,
                gathered=_gathered(job, gathers),
                reduced=none if forward else _reduced(job, units, last),
                alone=none if forward else _reduced(job, Counter([0]), last),
                decoded=_decoded(job, gathers),
                cast=_cast(job, gathers),
                summed=0 if forward else sum(layout.numel for layout in job.layouts),
            )
        )
    return passes


def repeated(passes: list[Pass], micro_batches: int) -> list[Pass]:
    """The passes of the same job with other micro-batches, if it has more than two before and after."""
    assert len(passes) == 2 * _DIFFERENT <= 2 * micro_batches
    times = micro_batches - _DIFFERENT + 1
    return [replace(one, times=times if at in (2, 3) else 1) for at, one in enumerate(passes)]


def total(passes: list[Pass]) -> SentBytes:
    """Bytes of the whole step: `intra_node_bytes` and `inter_node_bytes` of metrics.jsonl."""
    return sum((one.sent * one.times for one in passes), SentBytes())


def _gathers_of(job: Job, order: list[tuple[bool, int]]) -> list[_Gathers]:
    """The gathers of these passes: of a forward or not, and of which micro-batch.

    Those that the optimizer of the step before starts count as those of the first forward.
    """
    plan = job.communication
    if plan.gathers_in_place:
        return [_Gathers() for _ in order]
    now = _Gathers()

    def gather(index: int) -> Pending:
        now.filled[index] += 1
        return Pending()

    prefetcher = Prefetcher(plan, gather)
    for _ in range(2):  # the second step starts in the state that the first one left
        gathered, now = [], _Gathers()
        prefetcher.begin_step()
        for index, weights in enumerate(plan.units):
            now.brought[index] += bool(weights.bring)
            prefetcher.updated(index)
        for forward, _index in order:
            _visit(prefetcher, job, forward)
            gathered.append(now)
            now = _Gathers()
    return gathered


def _visit(prefetcher: Prefetcher, job: Job, forward: bool) -> None:
    """Call what the hooks of zero/hooks.py call in one pass."""
    places = range(len(job.units))
    prefetcher.begin(Phase.FORWARD if forward else Phase.BACKWARD)
    if forward:
        for place in places:
            prefetcher.before_forward(place)
        return
    recomputed = {chunk[-1]: chunk for chunk in job.communication.reads.recomputed}
    for place in reversed(places):
        prefetcher.before_backward(place)
        for again in recomputed.get(place, ()):
            prefetcher.before_forward(again)


def _reduced(job: Job, units: Counter[int], last: bool) -> SentBytes:
    """Bytes that all ranks send to reduce these units in one micro-batch, a step's `last` or another one."""
    return _by_all_ranks(job, units, lambda weights: weights.reduced(job.micro_batches, last=last))


def _gathered(job: Job, gathers: _Gathers) -> SentBytes:
    """Bytes that all ranks send for these gathers."""
    brought = _by_all_ranks(job, gathers.brought, lambda weights: weights.brought)
    return brought + _by_all_ranks(job, gathers.filled, lambda weights: weights.filled)


def _by_all_ranks(job: Job, units: Counter[int], sent: Callable[[UnitPlan], SentBytes]) -> SentBytes:
    """The sum over all ranks of what one sends for each of these units, as often as they are counted."""
    of_a_node = (
        sent(weights) * times
        for plan in job.node_communication
        for weights, times in _alike(job, plan, units)
    )
    return sum(of_a_node, SentBytes()) * (job.nodes * job.tensor)


def _alike(job: Job, plan: CommunicationPlan, units: Counter[int]) -> list[tuple[UnitPlan, int]]:
    """How often units of equal plans are gathered."""
    found: Counter[int] = Counter()
    for unit, times in units.items():
        found[job.kinds[unit]] += times
    return [(plan.units[kind], times) for kind, times in found.items() if times]


def _decoded(job: Job, gathers: _Gathers) -> int:
    """Elements that a rank decodes: of what is kept when it is brought, else of the slot."""
    brought, filled = (_alike(job, job.communication, units) for units in (gathers.brought, gathers.filled))
    kept = sum(len(weights.kept_elements) * times for weights, times in brought if weights.decodes)
    return kept + sum(
        weights.layout.numel * times for weights, times in filled if weights.decodes and not weights.bring
    )


def _cast(job: Job, gathers: _Gathers) -> int:
    """Elements that a rank casts: its part of the reference, in every gather."""
    return sum(
        len(weights.kept_elements) * times
        for weights, times in _alike(job, job.communication, gathers.filled)
        if weights.differences is not None
    )
