"""Searches settings for the fastest step that fits, with the run's global batch, length, ranks and link.

A micro-batch that fits says that smaller ones fit, and the time without links bounds a step from below, so
most settings are settled before their memory is computed. plan/space.py says which settings are tried.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.plan.changes import changed_flags
from megatron_zpp.plan.hardware import Machine
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import Memory, memory_of
from megatron_zpp.plan.space import (
    OFF,
    Space,
    bases,
    families,
    in_chunks_as,
    in_fewer_bits,
    in_first_layers,
    in_micro_batches_of,
    neighbours,
    recomputations,
    sizes_of,
    with_samples_of,
    zeros,
)
from megatron_zpp.plan.step_time import StepTime, compute_seconds, step_time
from megatron_zpp.plan.traffic import Pass, repeated, total, traffic_of

WORTH = 0.01  # of a step's time: the model is not accurate enough for smaller differences
_NEAR = 1.25  # times as long as the best: what the second best may take
_LONG = 8192  # tokens of a sample: of shorter ones context ranks would have too few
_STEP, _MOST = 1024, 2**24  # tokens of samples: between those that are tried, and of the last one


@dataclass(frozen=True)
class Plan:
    """One setting and its predictions."""

    job: Job
    memory: Memory
    sent: SentBytes
    time: StepTime

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.seconds


def plan_of(job: Job, machine: Machine) -> Plan:
    """All predictions for one setting."""
    passes = traffic_of(job)
    return Plan(job, memory_of(job), total(passes), step_time(job, machine, passes))


@dataclass(frozen=True)
class Found:
    """What a search has found.

    `best` is None if nothing fits; `least` then takes the least memory of all. `rounded`: the best with
    messages of 8 or 4 bits, if it is faster than `best`.
    """

    run: Plan
    best: Plan | None
    least: Plan
    second: Plan | None = None
    rounded: Plan | None = None


def search(run: Job, machine: Machine, gibibytes: float) -> Found:
    """The best settings for the run on GPUs of this memory, the second best, and the best in fewer bits."""
    own = plan_of(run, machine)
    tried = _Tried(run, machine, gibibytes)
    if own.memory.fits(gibibytes):
        tried.plans.append(own)
    long = run.model.seq_length >= _LONG and not _fits_as_it_is(run, gibibytes)
    space = Space(long=run.context > 1 or long)
    for base in bases(run):
        tried.families(families(base, space), space)
        if tried.plans:
            break
    best = tried.best()
    if best is None:
        least = min((run, *tried.smallest), key=lambda job: memory_of(job).peak)
        return Found(own, None, plan_of(least, machine))
    return Found(own, best, best, tried.second(best), _rounded(run, best, machine, gibibytes))


def fastest(run: Job, machine: Machine, gibibytes: float, space: Space) -> Plan | None:
    """The fastest settings of a space that fit, for a run that asks for these alone; None if none fits."""
    tried = _Tried(None, machine, gibibytes)
    tried.families(families(run, space), space)
    return tried.best()


def _rounded(run: Job, best: Plan, machine: Machine, gibibytes: float) -> Plan | None:
    """The best plan in fewer bits, if it is faster; None where the best plan waits for no links."""
    job = best.job
    held_otherwise = job.precision.fp8_param_gather or job.optimizer.splits_weights
    if held_otherwise or best.time.exposed < WORTH * best.seconds:
        return None
    tried = _Tried(run, machine, gibibytes, limit=(1 - WORTH) * best.seconds)
    tried.families(in_fewer_bits(best.job), Space())
    return tried.best()


def _fits_as_it_is(run: Job, gibibytes: float) -> bool:
    """Whether a sample fits one rank, with states in shards and nothing recomputed."""
    stage_3 = [zero for zero in zeros(run, Space()) if zero.zero_stage == 3] or [run.zero]
    one = in_micro_batches_of(run, sizes_of(run, Space())[0])
    jobs = (one.varied(recompute=in_chunks_as(run, OFF), zero=zero) for zero in stage_3)
    return any(memory_of(job).fits(gibibytes) for job in jobs)


@dataclass
class _Tried:
    """The plans that fit and are about as fast as the fastest."""

    run: Job | None  # whose settings the best should change as little as possible
    machine: Machine
    gibibytes: float
    limit: float = inf  # seconds of a step that is of use
    plans: list[Plan] = field(default_factory=list)
    smallest: list[Job] = field(default_factory=list)  # of families of which nothing fits

    @property
    def bound(self) -> float:
        """Seconds above which a plan cannot be the best."""
        fastest = min((plan.seconds for plan in self.plans), default=inf)
        return min(self.limit, fastest * (1 + WORTH))

    def best(self) -> Plan | None:
        """Of the plans that are as fast as any, the one with the fewest changes, then the fewest bytes."""
        near = [plan for plan in self.plans if plan.seconds <= self.bound]
        return min(
            near,
            key=lambda plan: (self._changes(plan), plan.sent.inter + plan.sent.intra, plan.memory.peak),
            default=None,
        )

    def second(self, best: Plan) -> Plan | None:
        """The fastest of these, and of what differs in one setting from the best, and trades something.

        That is a tenth less memory or bytes between nodes than the best, or fewer changes of the run.
        """
        found = list(self.plans)
        for job in neighbours(best.job):
            if self._least_seconds(job) <= _NEAR * best.seconds and memory_of(job).fits(self.gibibytes):
                found.append(plan_of(job, self.machine))
        near = [plan for plan in found if plan.seconds <= _NEAR * best.seconds and self._trades(plan, best)]
        return min(near, key=lambda plan: plan.seconds, default=None)

    def _trades(self, plan: Plan, best: Plan) -> bool:
        less = plan.memory.peak < 0.9 * best.memory.peak or plan.sent.inter < 0.9 * best.sent.inter
        return less or self._changes(plan) < self._changes(best)

    def families(self, families: Iterable[Job], space: Space) -> None:
        """Try every size of micro-batches and every recomputation of jobs that differ in other settings."""
        partly: list[tuple[float, Job]] = []
        for job in families:
            sizes, (given, more) = sizes_of(job, space), recomputations(job, space)
            small = in_micro_batches_of(job, sizes[0])
            least = [small.varied(recompute=each) for each in dict.fromkeys(given)]
            if not any(memory_of(each).fits(self.gibibytes) for each in least):
                self.smallest += least
                continue
            passes = _Passes()
            for recompute in dict.fromkeys([*given, *more]):
                partly += self._sizes_of(small.varied(recompute=recompute), sizes, passes)
        for seconds, job in sorted(partly if space.others else [], key=lambda each: each[0]):
            if seconds <= self.bound:
                self._partly_recomputed(job)

    def _sizes_of(self, job: Job, sizes: list[int], passes: "_Passes") -> Iterator[tuple[float, Job]]:
        """Try micro-batches of all sizes, the fastest first; yield those that recomputation could fit."""
        jobs = [in_micro_batches_of(job, size) for size in sizes]
        jobs = [each for each in jobs if self._least_seconds(each) <= self.bound]
        timed = [(each, step_time(each, self.machine, passes.of(each))) for each in jobs]
        too_large = inf
        for each, time in sorted(timed, key=lambda pair: pair[1].seconds):
            if time.seconds > self.bound:
                return
            memory = memory_of(each) if each.micro_batch_size < too_large else None
            if memory and memory.fits(self.gibibytes):
                self.plans.append(Plan(each, memory, total(passes.of(each)), time))
            else:
                too_large = min(too_large, each.micro_batch_size)
                if job.recompute.recompute_granularity is None:
                    yield time.seconds, each

    def _least_seconds(self, job: Job) -> float:
        """Seconds of a step without links, optimizer and kernels."""
        compute = sum(compute_seconds(job, self.machine, forward) for forward in (True, False))
        return job.micro_batches * compute

    def _partly_recomputed(self, job: Job) -> None:
        """Try the job with recomputation of as few layers as make it fit."""
        some = range(1, job.model.num_layers)
        fewer = bisect_left(
            some, True, key=lambda count: memory_of(in_first_layers(job, count)).fits(self.gibibytes)
        )
        if fewer < len(some):
            plan = plan_of(in_first_layers(job, some[fewer]), self.machine)
            self.plans += [plan] if plan.seconds <= self.bound else []

    def _changes(self, plan: Plan) -> int:
        return 0 if self.run is None else len(changed_flags(self.run, plan.job))


class _Passes(dict[tuple[int, tuple[range, ...]], list[Pass]]):
    """What jobs send that differ in micro-batches and in the recomputation of single layers alone."""

    def of(self, job: Job) -> list[Pass]:
        """The passes of a job."""
        key = min(job.micro_batches, 3), job.chunks
        found = self.get(key) or self.setdefault(key, traffic_of(job))
        return repeated(found, job.micro_batches) if key[0] == 3 else found


def longest_sample(job: Job, gibibytes: float) -> int:
    """Tokens of the longest sample with which the job fits; 0 if it does not fit with the shortest.

    A multiple of 1,024 tokens per rank that shares samples or layers. Where positions are learned, their
    table is as long.
    """
    step = _STEP * job.context * job.tensor
    lengths = range(step, _MOST + step, step)
    return step * bisect_left(
        lengths, True, key=lambda tokens: not memory_of(with_samples_of(job, tokens)).fits(gibibytes)
    )
