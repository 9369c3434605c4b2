"""The settings that a search tries: jobs with other micro-batches, recomputation, ZeRO settings and ranks.

Tried together: micro-batches of every size that divides the batch, recomputation (as given, off, selective,
full, or full in the first layers), ZeRO's stages, hpZ and gradient groups of whole nodes or as given, and all
numbers of tensor ranks. Where a long sample does not fit, or fits only with recomputation, also context
ranks, and the MLP in chunks. What makes a step slower than other ways to save memory is tried only where
nothing fits without it: units of sublayers, then the optimizer in CPU memory.

These settings leave the numerics alone: they move the same numbers, and at most add them in another order.
Formats of 8 and 4 bits do not, and are searched by themselves (`in_fewer_bits`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_zpp.config.model import RecomputeConfig
from megatron_zpp.config.shapes.tensor_parallel import (
    check_context_ranks,
    check_tensor_ranks,
    check_vocabulary,
)
from megatron_zpp.config.words import divisors
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.plan.job import Job, units_of

_CHUNK = 8192  # tokens of a chunk of an MLP: products of these read their weights in little of their time

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


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which settings may differ from the run's."""

    stage: bool = True  # and the groups of hpZ and of gradients, where they are not given
    micro_batch: bool = True
    others: bool = True  # recomputation, tensor ranks, formats as given or none, and what saves memory
    long: bool = False  # context ranks, and MLPs in chunks


def bases(run: Job) -> Iterator[Job]:
    """The run without what saves memory and time is paid for, then with more and more of it."""
    on_gpu = run.zero.zero_offload_optimizer and replace(run.zero, zero_offload_optimizer=False)
    plain = run.varied(zero=on_gpu) if on_gpu else run
    yield plain
    zero = replace(plain.zero, zero_unit="sublayer")
    cut = plain.varied(zero=zero, units=units_of(plain.model, plain.vocab_size, plain.tensor, zero))
    yield cut
    if run.may_offload:
        for base in (plain, cut):
            yield base.varied(zero=replace(base.zero, zero_offload_optimizer=True))


def families(base: Job, space: Space) -> Iterator[Job]:
    """Jobs with all tensor and context ranks and ZeRO settings of a space."""
    sizes = set(divisors(base.local)) if space.others else {base.tensor}
    for context in divisors(base.local) if space.long else [base.context]:
        for job in _with_ranks(base, sizes, context):
            for zero in zeros(job, space):
                yield job.varied(zero=zero)


def in_fewer_bits(best: Job) -> Iterator[Job]:
    """Jobs whose messages have 8 or 4 bits, with as many tensor ranks as the best one, or none."""
    if best.precision.grad_reduce_in_bf16:
        best = best.varied(precision=replace(best.precision, grad_reduce_in_bf16=False))
    for job in _with_ranks(best, {1, best.tensor}, best.context):
        for zero in _settings(job, (1, 2, 3) if job.mesh.shard_ranks > 1 else (), _FORMATS, keep=False):
            yield job.varied(zero=zero)


def neighbours(job: Job) -> Iterator[Job]:
    """Jobs that differ in one setting: micro-batch size, recomputation, ZeRO or tensor ranks."""
    for size in sizes_of(job, Space()):
        yield in_micro_batches_of(job, size)
    for recompute in (OFF, FULL):
        yield job.varied(recompute=in_chunks_as(job, recompute))
    for zero in zeros(job, Space()):
        yield job.varied(zero=zero)
    for other in _with_ranks(job, set(divisors(job.local)) - {job.tensor}, job.context):
        if job.zero not in zeros(other, Space()):  # its groups may not divide these data ranks
            continue
        most = max(1, job.micro_batch_size * other.tensor // job.tensor)
        yield in_micro_batches_of(other, max(size for size in sizes_of(other, Space()) if size <= most))


def zeros(job: Job, space: Space) -> Iterator[ZeroConfig]:
    """ZeRO settings of all stages, or the given one: those that gather least often first."""
    given, keep = job.zero, not space.others
    if keep and not space.stage:
        return iter([given])
    formats = [{name: getattr(given, name) for name in _FORMATS[-1]} if given.quantizes else {}]
    if given.quantizes and not keep:
        formats = [{}, *formats]
    stages = range(4) if job.mesh.shard_ranks > 1 else {0, given.zero_stage}
    return _settings(job, stages, formats, keep=keep)


def _settings(
    job: Job, stages: Iterable[int], formats: Sequence[dict[str, Any]], *, keep: bool
) -> Iterator[ZeroConfig]:
    """These stages in these formats, with hpZ and gradient groups of whole nodes, or without.

    `keep`: groups that are given stay. Settings that the mesh, or another setting, refuses are omitted.
    """
    given, wide = job.zero, ["auto"] if job.nodes > 1 else []
    hpz, groups = given.zero_hpz_partition_size, given.zero_gradient_partition_size
    hpz_sizes = [hpz] if keep and given.hpz else ["1", hpz, *wide]
    group_sizes = [groups] if keep and groups != "off" else ["off", groups, *wide]
    sizes = dict.fromkeys(product(hpz_sizes, group_sizes))
    for stage, of_messages, (size, group) in product(stages, formats, sizes):
        try:
            zero = ZeroConfig(
                zero_stage=stage,
                zero_hpz_partition_size=size,
                zero_gradient_partition_size=group,
                zero_offload_optimizer=given.zero_offload_optimizer,
                zero_unit=given.zero_unit,
                zero_prefetch_units=given.zero_prefetch_units if stage == 3 or keep else None,
                **of_messages,
            )
            check_routes(zero, job.mesh)
        except ValueError:
            continue
        yield zero


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
        samples = job.samples_per_step // data_ranks
        micro = job.micro_batch_size if samples % job.micro_batch_size == 0 else 1
        if job.may_resize or micro == job.micro_batch_size:
            yield job.varied(
                tensor=size,
                context=context,
                units=units_of(job.model, job.vocab_size, size, job.zero),
                micro_batch_size=micro,
                micro_batches=samples // micro,
            )


def _divides(job: Job, size: int, context: int) -> bool:
    """Whether `size` ranks can share each layer and `context` each sample, so that a run is not refused."""
    try:
        check_context_ranks(job.model, context, size, job.comm_type)
        check_tensor_ranks(job.model, size, fp8=job.precision.fp8)
        check_vocabulary(job.model, job.precision, job.vocab_size, size)
    except ValueError:
        return False
    return job.local % (size * context) == 0


def sizes_of(job: Job, space: Space) -> list[int]:
    """The sizes of micro-batches, the smallest first."""
    if not (space.micro_batch and job.may_resize):
        return [job.micro_batch_size]
    if job.optimizer.optimizer_in_backward:  # one micro-batch per step
        return [job.samples_per_step // job.mesh.data_ranks]
    whole = job.batch_multiple or job.samples_per_step
    tokens = job.model.seq_length // job.context
    multiple = 16 if job.precision.fp8 else 1  # of which 8-bit products need tokens
    return [size for size in divisors(whole // job.mesh.data_ranks) if size * tokens % multiple == 0]


def in_micro_batches_of(job: Job, size: int) -> Job:
    """The job with its samples in micro-batches of another size."""
    samples = job.samples_per_step // job.mesh.data_ranks
    return job.varied(micro_batch_size=size, micro_batches=samples // size)


def recomputations(job: Job, space: Space) -> tuple[list[RecomputeConfig], list[RecomputeConfig]]:
    """What is tried before recomputation of some layers: what may take least memory, and the others."""
    off, selective, full = (in_chunks_as(job, each) for each in (OFF, SELECTIVE, FULL))
    least, more = [job.recompute], list[RecomputeConfig]()
    if space.others:
        least, more = [job.recompute, full], [off, selective]
    if space.long and (chunks := suggested_chunks(job)) > 1:
        least.append(replace(full, mlp_chunks_for_training=chunks))
        more.append(replace(off, mlp_chunks_for_training=chunks))
    return least, more


def in_first_layers(job: Job, count: int) -> Job:
    """The job with recomputation of so many layers."""
    some = RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=count)
    return job.varied(recompute=in_chunks_as(job, some))


def in_chunks_as(job: Job, recompute: RecomputeConfig) -> RecomputeConfig:
    """The recomputation, with the MLP in as many chunks as the job has it."""
    return replace(recompute, mlp_chunks_for_training=job.recompute.mlp_chunks_for_training)


def suggested_chunks(job: Job) -> int:
    """Chunks of an MLP in which products still have enough tokens; 1 where they are given, or few tokens."""
    if job.recompute.mlp_chunks_for_training > 1:
        return 1
    return max(1, job.model.seq_length // (job.context * _CHUNK))


def with_samples_of(job: Job, tokens: int) -> Job:
    """The job with samples of so many tokens."""
    if job.model.position_embedding_type != "learned_absolute":
        most = max(tokens, job.model.max_position_embeddings)
        return job.varied(model=replace(job.model, seq_length=tokens, max_position_embeddings=most))
    model = replace(job.model, seq_length=tokens, max_position_embeddings=tokens)
    one_layer = replace(model, num_layers=1, window_attn_skip_freq=None)
    small = units_of(one_layer, job.vocab_size, job.tensor, job.zero)
    units = [small[0], *job.units[1:-1], small[-1]]
    return job.varied(model=model, units=units)
