"""Predicts the time of a step: FLOPs over the GPU's rate, and at the same time bytes over those of links.

A pass is a forward or a backward of one micro-batch.

    compute   PaLM's FLOPs, one third in the forward and two in the backward, and those of the recomputation,
              over the share of the peak that is reached; a little longer beside transfers. Of attention they
              are those of what its mask leaves, more slowly. Those of layers' products, and perhaps of the
              output layer's, take less time in 8 bits. Each product reads its
              weights, and their gradients are written, which takes longer than the FLOPs of a few hundred
              tokens: the two hide each other, as the root of the sum of their squares
    kernels   memory traffic that these FLOPs do not cover, over the rate that kernels reach: messages decoded
              and encoded, references of weight differences cast, gradients copied, received parts summed
    links     bytes that a node sends to others over the link's rate, and bytes that a GPU sends inside its
              node over NVLink's. Gathers and reductions share a link; the two links work at the same time.
              Over sockets one communicator does not fill the link, so each of the two has its own rate

Gathers run ahead of both passes and reductions behind the backward, so a pass takes as long as the longest of
the three. The last unit's reduction has no compute left to run behind, and links wait for one unit's compute:
the last gather arrives before the last unit's forward, and the first reduction follows the first unit's
backward. The time that a pass takes beyond its compute and kernels is exposed. The optimizer reads 12 bytes
per parameter of its share and the gradient, and writes 12 bytes and what is sent, at the memory's rate, or if
offloaded at the CPU's; fewer bytes with --use-precision-aware-optimizer. Ranks that share layers have equal
parts of their FLOPs, compute these more slowly than a rank with whole layers, and wait for each other as
plan/exchanges.py says. docs/internals/planner.md lists what is not modelled.
"""

import math
from dataclasses import dataclass

import torch

from megatron_zpp.exchange.route import SentBytes, plain
from megatron_zpp.model.flops import layer_matrices
from megatron_zpp.plan.exchanges import (
    attention_flops,
    exchanged,
    exchanged_bytes,
    recomputed_layers,
    recomputed_matrices,
    waiting_seconds,
)
from megatron_zpp.plan.hardware import (
    CPU_BYTES_PER_SECOND,
    FP8_CASTS,
    FP8_DELAYED_CASTS,
    FP8_NARROWEST,
    FP8_OUTPUT,
    FP8_PRODUCTS,
    KERNEL_SLOWDOWN,
    SLOWDOWN,
    TENSOR_SLOWDOWN,
    Machine,
)
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.traffic import Pass, total

_FEEDBACK = 2  # bytes that kernels read and write for each byte of residuals


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `link` and `inside`: how long the links are busy, mostly behind the compute.

    `exchanges`: of those that are exposed, what a rank waits for the ranks that share its layers. `again`: of
    the backward, what is computed again.
    """

    forward: float  # compute and kernels
    backward: float
    exposed_forward: float
    exposed_backward: float
    optimizer: float
    link: float
    inside: float
    exchanges: float = 0.0
    again: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that the GPU waits for links."""
        return self.exposed_forward + self.exposed_backward

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.exposed + self.optimizer


def step_time(job: Job, machine: Machine, passes: list[Pass]) -> StepTime:
    """The time of a step with these passes, which are `traffic_of(job)`."""
    busy, exposed = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for one in passes:
        working = compute_seconds(job, machine, one.forward) + _kernel_seconds(job, machine, one)
        busy[one.forward] += working * one.times
        exposed[one.forward] += (pass_seconds(job, machine, one, working) - working) * one.times
    sent = total(passes)
    return StepTime(
        forward=busy[True],
        backward=busy[False],
        exposed_forward=exposed[True],
        exposed_backward=exposed[False],
        optimizer=_optimizer_seconds(job, machine),
        link=_link_seconds(job, machine, sent),
        inside=_inside_seconds(job, machine, sent) + exchanged_bytes(job) / machine.inside,
        exchanges=sum(waiting_seconds(job, machine, one.forward) * one.times for one in passes),
        again=job.micro_batches * job.tokens * _recomputed_flops(job) / machine.flops * _slowdown(job),
    )


def pass_seconds(job: Job, machine: Machine, one: Pass, working: float) -> float:
    """Seconds of one pass with `working` seconds of compute and kernels."""
    between = one.alone.inter / job.nodes / min(machine.link, machine.exchange)
    hops = between, _inside_seconds(job, machine, one.alone)
    in_turn = _in_turn(job)
    alone = sum(hops) if in_turn else max(hops)
    gathers = one.gathered.inter / job.nodes / machine.gather
    reductions = one.reduced.inter / job.nodes / machine.exchange
    link, inside = _link_seconds(job, machine, one.sent), _inside_seconds(job, machine, one.sent)
    inside += exchanged(job, one.forward).nbytes / machine.inside
    one_unit = working / len(job.layouts)
    waiting = waiting_seconds(job, machine, one.forward)
    return max(working + waiting + alone, one_unit + max(link, inside, gathers, reductions))


def compute_seconds(job: Job, machine: Machine, forward: bool) -> float:
    """Seconds of a forward or backward of one micro-batch, without transfers and kernels."""
    third, table = job.flops_per_token / 3, job.model.hidden_size * job.padded_vocab_size
    flops = third if forward else 2 * third + _recomputed_flops(job)
    # Parameters of layers' matrices in products, as often as there are any.
    once = job.model.num_layers * layer_matrices(job.model)
    matrices = once if forward else 2 * once + recomputed_matrices(job)
    flops -= (1 - product_time(job)) * 2.0 * matrices
    flops -= (1 if forward else 2) * (attention_flops(job, counted=True) - attention_flops(job))
    if job.precision.fp8_output_layer:
        flops -= (1 - FP8_OUTPUT) * (2.0 * table) * (1 if forward else 2)
    # Weights of products are read, and their gradients written.
    moved = (matrices + (table if forward else 2 * table)) * job.dtype.itemsize
    return math.hypot(job.tokens * flops / machine.flops, moved / machine.memory_rate) * _slowdown(job)


def _slowdown(job: Job) -> float:
    """The factor on the time of compute: tensor ranks have a part of it, and transfers run beside it."""
    return overlap_slowdown(job) * (TENSOR_SLOWDOWN / job.tensor if job.tensor > 1 else 1.0)


def product_time(job: Job) -> float:
    """The time of a layer's matrix products, with the casts of 8-bit ones, over that of 16-bit ones."""
    if not job.precision.fp8:
        return 1.0
    casts = FP8_DELAYED_CASTS if job.precision.fp8_delayed else FP8_CASTS
    return FP8_PRODUCTS + casts / max(job.model.hidden_size, FP8_NARROWEST)


def overlap_slowdown(job: Job) -> float:
    """The factor by which compute takes longer beside what data ranks send each other."""
    if job.mesh.shard_ranks == 1:
        return 1.0
    return KERNEL_SLOWDOWN if job.nodes == 1 and not job.copy_engines else SLOWDOWN


def _recomputed_flops(job: Job) -> float:
    """FLOPs per token of recomputed layers and MLPs, and with `selective` of attention's scores."""
    scores, again = attention_flops(job), 2.0 * recomputed_matrices(job)
    if job.recompute.recompute_granularity == "selective":
        return again + scores
    return again + recomputed_layers(job) / job.model.num_layers * scores


def _kernel_seconds(job: Job, machine: Machine, one: Pass) -> float:
    """Seconds to decode messages of weights, to cast references, and to copy, encode and sum gradients."""
    plan, itemsize, nbytes = job.communication, job.dtype.itemsize, 0.0
    if differences := plan.differences:  # the reference is read and written
        # each gather casts the reference, or it is read once more and its codes are written
        cast = 5 * one.decoded if job.precision.fp8_param_gather else (4 + itemsize) * one.cast
        nbytes += one.decoded * (differences.bytes_per_element + 8) + cast
    elif weights := plan.weight_codes:
        nbytes += one.decoded * (weights.block_bytes / weights.block + itemsize)
    if not one.forward:
        sent_bytes = job.reduced.gradient_dtype.itemsize  # per element that travels in a dtype
        if job.micro_batches == 1:
            sent_bytes = min(sent_bytes, itemsize)
        if not (job.reduced.gradients and job.reduces_as_made):  # added to fp32 sums
            nbytes += one.summed * (itemsize + 8)
        elif not plan.peer_writes(job.reduced.gradients):  # else they are sent from where they were made
            nbytes += one.summed * (itemsize + sent_bytes)
        if one.reduced != SentBytes():
            nbytes += one.summed * _reduced_bytes(job, sent_bytes)
        if one.reduced.inter:  # what codes have lost is added, decoded, and kept
            nbytes += _FEEDBACK * plan.residual_bytes
    return nbytes / machine.memory_rate


def _reduced_bytes(job: Job, sent_bytes: int) -> float:
    """Bytes per element of the whole gradient that a reduction reads and writes in memory."""
    nbytes = sent_bytes + 8 / job.mesh.shard_ranks
    first, last = job.reduced.gradients[0].format, job.reduced.gradients[-1].format
    if not isinstance(first, torch.dtype):
        nbytes += 2 * first.bytes_per_element
    elif _in_turn(job):
        nbytes += 2 * plain(last).itemsize / job.mesh.replicas.size
    return nbytes


def _in_turn(job: Job) -> bool:
    """Whether the stages of a reduction run one after the other; those of qgZ overlap by chunk."""
    return len(job.reduced.gradients) > 1 and not job.reduced.quantizes_gradients


def _optimizer_seconds(job: Job, machine: Machine) -> float:
    """Seconds of the norm, which reads the gradients unless their squares are known, and of AdamW."""
    owned, gradient = job.owned, 4 if job.sums_gradients else job.dtype.itemsize
    norm = 0.0 if job.returns_squared_norms else gradient * owned / machine.memory_rate
    written: float = job.dtype.itemsize
    if differences := job.communication.differences:
        written = 8 + differences.bytes_per_element  # weights and reference are read, and codes written
    elif job.precision.fp8_param_gather:
        written = 5  # master weights are read again, and codes written; the rest is small
    states = 2 * (4 + job.optimizer.moment_bytes)  # read and written
    if job.optimizer.splits_weights:
        states += 2 * (1 - 4) + 2  # a byte in place of fp32, beside bf16 weights, which are read too
    adamw = (states + gradient + written) * owned
    rate = CPU_BYTES_PER_SECOND if job.zero.zero_offload_optimizer else machine.memory_rate
    return norm + adamw / rate + _muon_seconds(job, machine)


def _muon_seconds(job: Job, machine: Machine) -> float:
    """Seconds that Muon takes more than AdamW: Newton-Schulz and its exchanges, less a state of 4 bytes.

    Where rounds take turns in two rooms, the first exchange of each is hidden by the work of the one before.
    """
    if not job.muon:
        return 0.0
    share = max(job.muon, key=lambda each: each.flops)
    # Two passes, which read and write an update too, in place of the second moment's bytes.
    saved = (2 * sum(job.optimizer.saved_bytes[2]) - 4) * share.elements / machine.memory_rate
    work, exchange = share.flops / machine.flops, job.dtype.itemsize * share.sent / machine.inside
    if job.optimizer.muon_row_scaling_beta2 is not None:  # updates are read twice, and written
        saved -= 3 * job.dtype.itemsize * share.worked / machine.memory_rate
        saved -= job.row_moments_sent / machine.inside
    hidden = min(work, exchange / 2) if share.rooms > 1 else 0.0
    return work + exchange - hidden - saved


def _link_seconds(job: Job, machine: Machine, sent: SentBytes) -> float:
    return sent.inter / job.nodes / machine.link


def _inside_seconds(job: Job, machine: Machine, sent: SentBytes) -> float:
    return sent.intra / job.ranks / machine.inside
