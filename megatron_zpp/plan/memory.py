"""What one rank holds, part by part, and when it holds most: the bytes that are handed out to tensors.

Model states and buffers are those that zero/build.py and zero/communication.py make, padding included, and
stay for the whole run. Gradients and activations come and go, and are not at their most together, so the
peak is looked for at the moments where it can be: in the loss, along the backward, in the optimizer.
"""

from collections import Counter
from dataclasses import dataclass

from megatron_zpp.plan.activations import (
    backward,
    ends_bytes,
    loss_bytes,
    offloaded_bytes,
    stored_bytes,
    working_bytes,
)
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.theory import (
    ERROR_BYTES,
    AllReduceAlgorithm,
    quantized_reduction_bytes,
    reduction_bytes,
    slots,
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `weights` to `zeropp` are there always, the others for a time; `peak` is of all."""

    weights: int  # as they compute and as they are sent
    optimizer: int  # fp32 weights and moments
    buffers: int  # gathers and reductions
    zeropp: int  # secondary shards, and what error feedback has kept
    gradients: int
    activations: int
    loss: int
    peak: int
    moment: str  # of the peak
    cpu: int  # states and activations in CPU memory

    @property
    def resident(self) -> int:
        """What is there always."""
        return self.weights + self.optimizer + self.buffers + self.zeropp


def memory_of(job: Job) -> Memory:
    """Of each rank: all hold the same."""
    owned = sum(layout.numel if job.zero.zero_stage == 0 else layout.shard_numel for layout in job.layouts)
    offloaded = job.zero.zero_offload_optimizer
    master_bytes = 4 if offloaded or job.dtype.itemsize < 4 or job.weight_format else 0
    optimizer = (8 + master_bytes) * owned
    parts = {
        "weights": _weights(job),
        "optimizer": 0 if offloaded else optimizer,
        "buffers": _buffers(job),
        "zeropp": _zeropp(job),
    }
    moments = _moments(job)
    moment, highest = max(moments.items(), key=lambda item: item[1])
    pinned = (4 + _published_itemsize(job)) * owned  # gradients on their way in, weights on their way out
    away = offloaded_bytes(job)
    return Memory(
        **parts,
        gradients=_gradients(job, whole=False),
        activations=stored_bytes(job) - away + ends_bytes(job),
        loss=loss_bytes(job),
        peak=sum(parts.values()) + highest,
        moment=moment,
        cpu=away + (int(optimizer + pinned) if offloaded else 0),
    )


def _weights(job: Job) -> int:
    """Slots of whole units; at stage 3 and for qwZ also the shard or message that is sent."""
    itemsize, stage = job.dtype.itemsize, job.zero.zero_stage
    total = 0
    for layout, units in Counter(job.layouts).items():
        count = slots(units, job.prefetch) if stage >= 3 else units
        total += count * layout.numel * itemsize
        if job.weight_format is not None:
            total += units * job.weight_format.message_bytes(layout.shard_numel)
        elif stage >= 3:
            total += units * layout.shard_numel * itemsize
    return total


def _buffers(job: Job) -> int:
    """What gradients are sent from, and the messages of gathers and reductions."""
    sent, algorithm = job.reduce_bytes, job.all_reduce_algorithm
    total = 0
    joined = {AllReduceAlgorithm.TWO_STEP: True, AllReduceAlgorithm.LIBRARY: sent != 4}.get(
        algorithm, not job.writes_peers
    )
    largest = max(layout.numel for layout in job.layouts)
    if joined and job.ranks > 1 and job.gradient_format is None:
        total += largest * sent
    if job.gradient_format is not None:
        total += largest * job.dtype.itemsize
        total += quantized_reduction_bytes(job.layouts, job.nodes, job.gradient_format)
    else:
        total += received_bytes(job)
    if job.weight_format is not None:
        largest = max(job.weight_format.message_bytes(layout.shard_numel) for layout in job.layouts)
        total += job.ranks * largest * (2 if job.secondary_codes else 1)
    return total


def received_bytes(job: Job) -> int:
    """What gradients as they are are received in: memory that other GPUs write if `job.writes_peers`."""
    if job.all_reduce_algorithm is AllReduceAlgorithm.LOCAL_SUM:
        return job.ranks * max(layout.numel for layout in job.layouts) * job.reduce_bytes
    if job.all_reduce_algorithm is AllReduceAlgorithm.LIBRARY:
        return 0
    sizes = {"reduce_bytes": job.reduce_bytes, "sum_bytes": job.sum_bytes}
    return reduction_bytes(job.layouts, job.nodes, **sizes)


def _zeropp(job: Job) -> int:
    total = 0
    if job.secondary_ranks is not None:
        for layout, units in Counter(job.layouts).items():
            if slots(units, job.prefetch) < units:
                part = layout.numel // job.secondary_ranks * job.dtype.itemsize
                if job.secondary_codes:
                    messages = job.ranks // job.secondary_ranks
                    part = messages * job.weight_format.message_bytes(layout.shard_numel)
                total += units * part
    if job.zero.zero_gradient_error_feedback and job.two_hops:
        total += ERROR_BYTES * job.nodes * sum(layout.shard_numel for layout in job.layouts)
    return total


def _moments(job: Job) -> dict[str, int]:
    """Gradients, activations and what is worked with, at each moment that can be the peak."""
    accumulated = _gradients(job, whole=True) if job.micro_batches > 1 else 0
    final = _gradients(job, whole=False)
    first = job.layouts[0].numel
    others = int(final * (1 - first / sum(layout.numel for layout in job.layouts)))  # without the embedding's
    away = offloaded_bytes(job)
    activations = ends_bytes(job) + stored_bytes(job) - away
    table = job.dtype.itemsize * job.padded_vocab_size * job.model.hidden_size  # the head's gradient of it
    tied = 0 if job.model.untie_embeddings_and_output_weights else table
    produced = job.dtype.itemsize * job.layouts[1].numel  # a layer's, before they are taken
    sent = _sent_bytes(job)
    on_their_way = int(sent * (2 * job.layouts[1].numel + job.layouts[-1].numel))  # layers' and the head's
    embedding = int(sent * first)
    from_before = 0  # since the last micro-batch
    if job.reduces_as_made and job.micro_batches > 1:
        from_before = on_their_way + embedding
    moments = {"the loss": accumulated + from_before + activations + loss_bytes(job)}
    for one in backward(job):
        for layers, live in (
            (one.layer + 1, one.stored + working_bytes(job)),
            (one.layer, one.left + produced),
        ):
            done = int(others * (1 - layers / job.model.num_layers))
            beside = on_their_way
            if accumulated and not job.reduces_as_made:  # from this backward alone: none at its beginning
                later = min(job.model.num_layers - layers, 2)
                beside = int(sent * (later * job.layouts[1].numel + job.layouts[-1].numel))
            moments.setdefault("the backward", 0)
            moments["the backward"] = max(
                moments["the backward"], max(accumulated, done) + live + tied + beside
            )
    produced = job.dtype.itemsize * first
    end = max(final + produced, others + produced + tied)
    if accumulated:  # all of it is there already when the embedding's two gradients become one
        end = accumulated + produced + max(tied, 0 if job.reduces_as_made else embedding)
    moments["the end of the backward"] = end + on_their_way
    moments["the optimizer's step"] = final
    return moments


def _sent_bytes(job: Job) -> float:
    """What reductions under way keep of an element beside `_gradients`.

    A gradient as it was made or, of a sum over micro-batches, its 16-bit copy or the shard that comes of it.
    """
    if job.reduces_as_made:
        return min(job.dtype.itemsize, job.reduce_bytes)
    if not job.sums_gradients:
        return 0
    if job.zero.zero_stage == 1:
        return 4 / job.ranks
    return job.reduce_bytes if job.reduce_bytes < 4 else 0


def _gradients(job: Job, *, whole: bool) -> int:
    """As the optimizer takes them, or (`whole`) as their fp32 sums are between micro-batches."""
    if not job.sums_gradients:
        return job.dtype.itemsize * sum(layout.numel for layout in job.layouts)
    stage = job.zero.zero_stage
    sharded = stage >= 2 or (stage == 1 and not whole)
    return 4 * sum(layout.shard_numel if sharded else layout.numel for layout in job.layouts)


def _published_itemsize(job: Job) -> float:
    if job.weight_format is not None:
        return job.weight_format.block_bytes / job.weight_format.block
    return 0 if job.dtype.itemsize == 4 else job.dtype.itemsize
