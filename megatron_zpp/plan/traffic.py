"""Bytes that all ranks together send in a step, by link, exactly as their ledgers will count them.

Gathers are counted pass by pass, by running the engine's Prefetcher without tensors. So what slots still
hold, what is gathered ahead and what recomputation needs are as in a run, for any stage, prefetch and
recomputation. What tensor ranks exchange is not among the bytes: plan/exchanges.py has it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.placement import Layout
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.hop import SentBytes
from megatron_zpp.zero.prefetch import Phase, Prefetcher

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
    """How many times one pass gathers a unit of each layout."""

    world: Counter[Layout] = field(default_factory=Counter)  # over all ranks
    secondary: Counter[Layout] = field(default_factory=Counter)  # inside hpZ groups


def traffic_of(job: Job) -> list[Pass]:
    """The passes of one optimizer step in the middle of a run."""
    walked = min(job.micro_batches, _DIFFERENT)
    order = [(forward, index) for index in range(walked) for forward in (True, False)]
    early, units, none = _early_reductions(job), Counter(job.layouts), SentBytes()
    passes = []
    for (forward, index), gathers in zip(order, _gathers_of(job, order), strict=True):
        last = index == walked - 1
        between = walked == _DIFFERENT and index == 1
        passes.append(
            Pass(
                forward=forward,
                times=job.micro_batches - walked + 1 if between else 1,
                gathered=_gathered(job, gathers),
                reduced=none if forward else _reduced(job, early, False) + _reduced(job, units, last),
                alone=none if forward else _reduced(job, Counter(job.layouts[:1]), last),
                decoded=sum(job.communication.gather_decodes(unit) * n for unit, n in gathers.world.items()),
                cast=_cast(job.communication, gathers),
                summed=0 if forward else sum(layout.numel for layout in job.layouts),
            )
        )
    return passes


def total(passes: list[Pass]) -> SentBytes:
    """Bytes of the whole step: `intra_node_bytes` and `inter_node_bytes` of metrics.jsonl."""
    return sum((one.sent * one.times for one in passes), SentBytes())


def _gathers_of(job: Job, order: list[tuple[bool, int]]) -> list[_Gathers]:
    """The gathers of these passes: of a forward or not, and of which micro-batch.

    Gathers that the previous step's optimizer starts count as those of the first forward.
    """
    if job.zero.zero_stage == 0 or job.data_ranks == 1:
        return [_Gathers() for _ in order]
    now = _Gathers()

    def gather(index: int, from_secondary: bool) -> Pending:
        (now.secondary if from_secondary else now.world)[job.layouts[index]] += 1
        return Pending()

    prefetcher = Prefetcher(job.communication, gather)
    for _ in range(2):  # the second step starts in the state that the first one left
        gathered, now = [], _Gathers()
        prefetcher.gather_after_step(range(len(job.layouts)))
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
    recomputed = {chunk[-1]: chunk for chunk in job.reads.recomputed}
    for place in reversed(places):
        prefetcher.before_backward(place)
        for again in recomputed.get(place, ()):
            prefetcher.before_forward(again)


def _early_reductions(job: Job) -> Counter[Layout]:
    """Units whose gradients a backward reduces place by place, without the last place."""
    early: Counter[Layout] = Counter()
    for unit, layout in enumerate(job.layouts):
        early[layout] += job.communication.reductions(unit) - 1
    return +early


def _reduced(job: Job, units: Counter[Layout], last: bool) -> SentBytes:
    """Bytes that all ranks send to reduce these units in one micro-batch, a step's `last` or another one."""
    return _by_all_ranks(
        job, units, lambda plan, unit: plan.reduction.bytes_sent(unit, job.micro_batches, last=last)
    )


def _gathered(job: Job, gathers: _Gathers) -> SentBytes:
    """Bytes that all ranks send for these gathers."""
    sent = _by_all_ranks(job, gathers.world, lambda plan, unit: plan.gather_bytes_sent(unit))
    return sent + _by_all_ranks(
        job, gathers.secondary, lambda plan, unit: plan.secondary_gather.bytes_sent(unit)
    )


def _by_all_ranks(
    job: Job, units: Counter[Layout], sent: Callable[[CommunicationPlan, Layout], SentBytes]
) -> SentBytes:
    of_a_node = (sent(plan, unit) * times for plan in job.node_communication for unit, times in units.items())
    return sum(of_a_node, SentBytes()) * (job.nodes * job.tensor)


def _cast(plan: CommunicationPlan, gathers: _Gathers) -> int:
    """Elements that a rank casts: its part of the reference, in every gather."""
    if plan.difference_format is None:
        return 0
    every = gathers.world + gathers.secondary
    return sum(len(plan.reference_elements(unit)) * times for unit, times in every.items())
