"""Counts the gathers of a step, pass by pass, by running the engine's Prefetcher without tensors.

So what slots still hold, what is gathered ahead and what recomputation needs are as in a run, for any stage,
prefetch and recomputation.
"""

from collections import Counter
from dataclasses import dataclass, field

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.prefetch import Phase, Prefetcher

_DIFFERENT = 3  # micro-batches whose gathers may differ: the first, one for all others, the last


@dataclass
class GatherCounts:
    """How many times one pass gathers a unit of each layout."""

    world: Counter[FlatLayout] = field(default_factory=Counter)  # over all ranks
    secondary: Counter[FlatLayout] = field(default_factory=Counter)  # inside hpZ groups


@dataclass(frozen=True)
class PassGathers:
    """A forward, or a backward with its recomputation, that a step repeats `times` times."""

    forward: bool
    micro_batch: int  # from 0; the last of them is a step's last
    times: int
    gathered: GatherCounts


def gathers_of(job: Job) -> list[PassGathers]:
    """The passes of a step in the middle of a run.

    Gathers that the previous step's optimizer starts count as those of the first forward.
    """
    walked = min(job.micro_batches, _DIFFERENT)
    order = [(forward, index) for index in range(walked) for forward in (True, False)]
    if job.zero.zero_stage == 0 or job.data_ranks == 1:
        gathered = [GatherCounts() for _ in order]
    else:
        now = GatherCounts()

        def gather(index: int, from_secondary: bool) -> Pending:
            (now.secondary if from_secondary else now.world)[job.layouts[index]] += 1
            return Pending()

        prefetcher = Prefetcher(job.communication, gather)
        for _ in range(2):  # the second step starts in the state that the first one left
            gathered, now = [], GatherCounts()
            prefetcher.gather_after_step(range(len(job.layouts)))
            for forward, _index in order:
                _visit(prefetcher, job, forward)
                gathered.append(now)
                now = GatherCounts()
    between = job.micro_batches - walked + 1
    return [
        PassGathers(forward, index, between if walked == _DIFFERENT and index == 1 else 1, sizes)
        for (forward, index), sizes in zip(order, gathered, strict=True)
    ]


def _visit(prefetcher: Prefetcher, job: Job, forward: bool) -> None:
    """Call what the hooks of zero/hooks.py call in one pass."""
    places = range(len(job.units))
    if forward:
        prefetcher.begin(Phase.FORWARD)
        for place in places:
            prefetcher.before_forward(place)
        return
    prefetcher.begin(Phase.BACKWARD)
    recomputed = {chunk[-1]: chunk for chunk in job.reads.recomputed}
    for place in reversed(places):
        prefetcher.before_backward(place)
        for again in recomputed.get(place, ()):
            prefetcher.before_forward(again)
