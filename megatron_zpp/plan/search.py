"""Searches settings for the fastest step that fits, with the run's global batch, length, ranks and link.

Tried together: micro-batches of every size that divides the batch, recomputation (as given, off, selective,
full, or full in the first layers), ZeRO's stages, hpZ and gradient groups of whole nodes or as given, and all
numbers of tensor ranks. Where a long sample does not fit, or fits only with recomputation, also context
ranks, and the MLP in chunks. What makes a step slower than other ways to save memory is tried only where
nothing fits without it: units of sublayers, tables in blocks, then the optimizer in CPU memory.

These settings leave the numerics alone: they move the same numbers, and at most add them in another order.
Formats of 8 and 4 bits do not, and are searched by themselves (`rounded`).

A micro-batch that fits says that smaller ones fit, and the time without links bounds a step from below, so
most settings are settled before their memory is computed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from megatron_zpp.config.model import RecomputeConfig
from megatron_zpp.config.shapes.tensor_parallel import (
    check_context_ranks,
    check_tensor_ranks,
    check_vocabulary,
    divisors,
)
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.checks import check_routes
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.plan.changes import changed_flags
from megatron_zpp.plan.hardware import Machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.memory import Memory, memory_of
from megatron_zpp.plan.step_time import StepTime, compute_seconds, step_time
from megatron_zpp.plan.traffic import Pass, repeated, total, traffic_of

WORTH = 0.01  # of a step's time: the model is not accurate enough for smaller differences
_NEAR = 1.25  # times as long as the best: what the second best may take
_CHUNK = 8192  # tokens of a chunk of an MLP: products of these read their weights in little of their time
_LONG = 8192  # tokens of a sample: of shorter ones context ranks would have too few
_MULTIPLE = 64  # rows of a block: whole tiles of matrix products

OFF, SELECTIVE = RecomputeConfig(), RecomputeConfig(recompute_granularity="selective")
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
_FORMATS: tuple[dict[str, Any], ...] = (  # of weights and gradients
    {"zero_quantized_gradients": True},
    {"zero_quantized_weights": True},
    {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    {
        "zero_quantized_weights": True,
        "zero_quantized_weights_format": "delta4",
        "zero_quantized_gradients": True,
        "zero_quantized_gradients_format": "rotated4",
    },
)


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

    def fits(self, gibibytes: float) -> bool:
        """Whether it fits a GPU of this memory."""
        return self.memory.fits(gibibytes)


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


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which settings may differ from the run's."""

    stage: bool = True  # and the groups of hpZ and of gradients, where they are not given
    micro_batch: bool = True
    others: bool = True  # recomputation, tensor ranks, formats as given or none, and what saves memory
    long: bool = False  # context ranks, and MLPs in chunks


def search(run: Job, machine: Machine, gibibytes: float) -> Found:
    """The best settings for the run on GPUs of this memory, the second best, and the best in fewer bits."""
    own = plan_of(run, machine)
    tried = _Tried(run, machine, gibibytes)
    if own.fits(gibibytes):
        tried.plans.append(own)
    long = run.model.seq_length >= _LONG and not _fits_as_it_is(run, gibibytes)
    space = Space(long=run.context > 1 or long)
    for base in _bases(run):
        tried.families(families(base, space), space)
        if tried.plans:
            break
    best = tried.best()
    if best is None:
        return Found(own, None, plan_of(min((run, *tried.smallest), key=_peak), machine))
    second = tried.second(best, [own] if own.fits(gibibytes) else [])
    return Found(own, best, best, second, _rounded(run, best, machine, gibibytes))


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
    tried.families(_in_fewer_bits(best.job), Space())
    return tried.best()


def _fits_as_it_is(run: Job, gibibytes: float) -> bool:
    """Whether a sample fits one rank, with states in shards and nothing recomputed."""
    stage_3 = [zero for zero in _zeros(run, Space()) if zero.zero_stage == 3] or [run.zero]
    one = in_micro_batches_of(run, sizes_of(run, Space())[0])
    jobs = (one.varied(recompute=_in_chunks_as(run, OFF), zero=zero) for zero in stage_3)
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
        return min(near, key=self._preference, default=None)

    def _preference(self, plan: Plan) -> tuple[int, int, int]:
        return self._changes(plan), plan.sent.inter + plan.sent.intra, plan.memory.peak

    def second(self, best: Plan, others: list[Plan]) -> Plan | None:
        """The fastest of `others` and of what differs in one setting from the best, and trades something.

        That is a tenth less memory or bytes between nodes than the best, or fewer changes of the run.
        """
        found = [*others, *self.plans]
        for job in _neighbours(best.job):
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
            sizes = sizes_of(job, space)
            off, selective, full = (_in_chunks_as(job, each) for each in (OFF, SELECTIVE, FULL))
            given, more = [job.recompute], list[RecomputeConfig]()
            if space.others:
                given, more = [job.recompute, full], [off, selective]
            if space.long and (chunks := suggested_chunks(job)) > 1:
                given.append(replace(full, mlp_chunks_for_training=chunks))
                more.append(replace(off, mlp_chunks_for_training=chunks))
            recomputes = dict.fromkeys([*given, *more])
            count = job.micro_batches * job.micro_batch_size // sizes[-1]
            large = replace(job, micro_batch_size=sizes[-1], micro_batches=count)
            if min(self._least_seconds(replace(large, recompute=each)) for each in recomputes) > self.bound:
                continue
            small, passes = in_micro_batches_of(job, sizes[0]), _Passes()
            least = [small.varied(recompute=each) for each in dict.fromkeys(given)]
            if not any(memory_of(each).fits(self.gibibytes) for each in least):
                self.smallest += least
                continue
            for recompute in recomputes:
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
        few, many = 0, job.model.num_layers
        while many - few > 1:
            middle = (few + many) // 2
            fits = memory_of(_in_first_layers(job, middle)).fits(self.gibibytes)
            few, many = (few, middle) if fits else (middle, many)
        if many < job.model.num_layers:
            plan = plan_of(_in_first_layers(job, many), self.machine)
            self.plans += [plan] if plan.seconds <= self.bound else []

    def _changes(self, plan: Plan) -> int:
        return 0 if self.run is None else len(changed_flags(self.run, plan.job))


class _Passes:
    """What jobs send that differ in micro-batches and in the recomputation of single layers alone."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, tuple[range, ...]], list[Pass]] = {}

    def of(self, job: Job) -> list[Pass]:
        """The passes of a job."""
        count = min(job.micro_batches, 3)
        key = count, job.chunks
        if key not in self._found:
            self._found[key] = traffic_of(job)
        found = self._found[key]
        return repeated(found, job.micro_batches) if count == 3 else found


def _peak(job: Job) -> int:
    return memory_of(job).peak


def _in_first_layers(job: Job, count: int) -> Job:
    some = RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=count)
    return job.varied(recompute=_in_chunks_as(job, some))


def _in_chunks_as(job: Job, recompute: RecomputeConfig) -> RecomputeConfig:
    """The recomputation, with the MLP in as many chunks as the job has it."""
    return replace(recompute, mlp_chunks_for_training=job.recompute.mlp_chunks_for_training)


def _bases(run: Job) -> Iterator[Job]:
    """The run without what saves memory and time is paid for, then with more and more of it."""
    on_gpu = run.zero.zero_offload_optimizer and replace(run.zero, zero_offload_optimizer=False)
    plain = run.varied(zero=on_gpu) if on_gpu else run
    yield plain
    cut = with_units(plain, zero_unit="sublayer", zero_table_rows=suggested_rows(run))
    yield cut
    if run.may_offload:
        for base in (plain, cut):
            yield base.varied(zero=replace(base.zero, zero_offload_optimizer=True))


def with_units(job: Job, **zero: Any) -> Job:
    """The job with other units."""
    changed = replace(job.zero, **{name: value for name, value in zero.items() if value is not None})
    return job.varied(zero=changed, units=_units(job, job.tensor, changed))


def _units(job: Job, tensor: int, zero: ZeroConfig) -> list[tuple[str, Any]]:
    return units_of(
        job.model, job.vocab_size, tensor, cut_layers=zero.cuts_layers, table_rows=zero.zero_table_rows
    )


def suggested_rows(job: Job) -> int | None:
    """Rows of blocks whose units are as large as a third of a layer; None for tables that are best as given.

    Those are tables smaller than a layer, and tables that are in blocks already, that tensor ranks share or
    that 8-bit products multiply. Blocks are equal if fewer than twice as many can be.
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


def suggested_chunks(job: Job) -> int:
    """Chunks of an MLP in which products still have enough tokens; 1 where they are given, or few tokens."""
    if job.recompute.mlp_chunks_for_training > 1:
        return 1
    return max(1, job.model.seq_length // (job.context * _CHUNK))


def families(base: Job, space: Space) -> Iterator[Job]:
    """Jobs with all tensor and context ranks and ZeRO settings of a space."""
    sizes = set(divisors(base.local)) if space.others else {base.tensor}
    for context in divisors(base.local) if space.long else [base.context]:
        for job in _with_ranks(base, sizes, context):
            for zero in _zeros(job, space):
                yield job.varied(zero=zero)


def sizes_of(job: Job, space: Space) -> list[int]:
    """The sizes of micro-batches, the smallest first."""
    if not (space.micro_batch and job.may_resize):
        return [job.micro_batch_size]
    if job.optimizer.optimizer_in_backward:  # one micro-batch per step
        return [job.samples_per_step // job.mesh.data_ranks]
    whole = job.batch_multiple or job.samples_per_step
    return [size for size in divisors(whole // job.mesh.data_ranks) if job.may_have_samples(size)]


def in_micro_batches_of(job: Job, size: int) -> Job:
    """The job with its samples in micro-batches of another size."""
    samples = job.samples_per_step // job.mesh.data_ranks
    return job.varied(micro_batch_size=size, micro_batches=samples // size)


def _neighbours(job: Job) -> Iterator[Job]:
    """Jobs that differ in one setting: micro-batch size, recomputation, ZeRO or tensor ranks."""
    for size in sizes_of(job, Space()):
        yield in_micro_batches_of(job, size)
    for recompute in (OFF, FULL):
        yield job.varied(recompute=_in_chunks_as(job, recompute))
    for zero in _zeros(job, Space()):
        yield job.varied(zero=zero)
    for other in _with_ranks(job, set(divisors(job.local)) - {job.tensor}, job.context):
        most = max(1, job.micro_batch_size * other.tensor // job.tensor)
        yield in_micro_batches_of(other, max(size for size in sizes_of(other, Space()) if size <= most))


def _with_ranks(job: Job, sizes: set[int], context: int) -> Iterator[Job]:
    """The job with each of these numbers of tensor ranks, and `context` ranks, that can share it."""
    whole = job.batch_multiple or job.samples_per_step
    for size in sorted(sizes):
        data_ranks = job.ranks // (size * context)
        if not _divides(job, size, context) or whole % data_ranks:
            continue
        if (size, context) == (job.tensor, job.context):
            yield job
            continue
        zero = job.zero
        if (zero.zero_table_rows or 0) % size:  # each block is shared
            zero = replace(zero, zero_table_rows=None)
        samples = job.samples_per_step // data_ranks
        micro = job.micro_batch_size if samples % job.micro_batch_size == 0 else 1
        if job.may_resize or micro == job.micro_batch_size:
            yield job.varied(
                tensor=size,
                context=context,
                zero=zero,
                units=_units(job, size, zero),
                micro_batch_size=micro,
                micro_batches=samples // micro,
            )


def _divides(job: Job, size: int, context: int) -> bool:
    """Whether `size` ranks can share each layer and `context` each sample, so that a run is not refused."""
    try:
        check_context_ranks(job.model, context, size, job.comm_type)
        check_tensor_ranks(job.model, size, fp8=job.precision.fp8)
        check_vocabulary(job.model, job.vocab_size, size)
        job.precision.check_vocabulary(job.padded_vocab_size, size)
    except ValueError:
        return False
    return job.local % (size * context) == 0


def _zeros(job: Job, space: Space) -> Iterator[ZeroConfig]:
    """ZeRO settings of all stages, or the given one: those that gather least often first."""
    given = job.zero
    if not (space.stage or space.others):
        yield given
        return
    stages = range(4) if job.mesh.shard_ranks > 1 else {0, given.zero_stage}
    for stage in stages:
        for formats in _formats_as_given(given, keep=not space.others):
            yield from _grouped(job, stage, formats, keep=not space.others)


def _formats_as_given(given: ZeroConfig, *, keep: bool) -> list[dict[str, Any]]:
    """The formats of a run, and unless it keeps them none."""
    formats = {name: getattr(given, name) for name in _FORMATS[-1]} if given.quantizes else {}
    return [formats] if keep or not formats else [{}, formats]


def _in_fewer_bits(best: Job) -> Iterator[Job]:
    """Jobs whose messages have 8 or 4 bits, with as many tensor ranks as the best one, or none."""
    if best.precision.grad_reduce_in_bf16:
        best = best.varied(precision=replace(best.precision, grad_reduce_in_bf16=False))
    for job in _with_ranks(best, {1, best.tensor}, best.context):
        for stage in (1, 2, 3) if job.mesh.shard_ranks > 1 else ():
            for formats in _FORMATS:
                for zero in _grouped(job, stage, formats, keep=False):
                    yield job.varied(zero=zero)


def _grouped(job: Job, stage: int, formats: dict[str, Any], *, keep: bool) -> Iterator[ZeroConfig]:
    """The settings of a stage in these formats, with hpZ and gradient groups of whole nodes, or without.

    `keep`: groups that are given stay. Settings that the mesh, or another setting, refuses are omitted.
    """
    given, wide = job.zero, ["auto"] if job.nodes > 1 else []
    hpz, groups = given.zero_hpz_partition_size, given.zero_gradient_partition_size
    hpz_sizes = [hpz] if keep and given.hpz else ["1", hpz, *wide]
    group_sizes = [groups] if keep and groups != "off" else ["off", groups, *wide]
    plain: dict[str, Any] = {
        "zero_stage": stage,
        "zero_offload_optimizer": given.zero_offload_optimizer,
        "zero_unit": given.zero_unit,
        "zero_table_rows": given.zero_table_rows,
        "zero_prefetch_units": given.zero_prefetch_units if stage == 3 or keep else None,
    }
    for size, group in dict.fromkeys(product(hpz_sizes, group_sizes)):
        try:
            zero = ZeroConfig(
                **plain, **formats, zero_hpz_partition_size=size, zero_gradient_partition_size=group
            )
            check_routes(zero, job.mesh)
        except ValueError:
            continue
        yield zero
