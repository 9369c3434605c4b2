"""The memory of one rank, part by part, and its peak, as the bytes allocated for tensors.

Model states and buffers are those of the engine's communication plan, padding included, and stay for the
whole run. Gradients and activations come and go and do not peak together. So the peak is looked for at the
points of a step where it can be: in the loss, along the backward, in the optimizer's step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_zpp.distributed.peer_rows import region_bytes
from megatron_zpp.model.shape import layer_shape
from megatron_zpp.placement import Layout
from megatron_zpp.plan.activations import (
    attention_bytes,
    attention_working_bytes,
    backward,
    ends_bytes,
    loss_bytes,
    offloaded_bytes,
    stored_bytes,
    working_bytes,
)
from megatron_zpp.plan.hardware import USABLE
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.gradients import STEPPED_THERE

PARTS = {  # of `Memory`, for a person
    "weights": "weights, as they compute and are sent",
    "optimizer": "master weights and moments",
    "buffers": "buffers of gathers and reductions",
    "zeropp": "secondary shards, references",
    "islands": "outer states",
    "gradients": "gradients, at the optimizer's step",
    "activations": "activations, at the loss",
    "loss": "the loss",
}
_SUMMING = 12  # bytes per element while tensor ranks sum a gradient: fp32, joined with others, and the sum


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `weights` to `islands` stay for the whole run; `peak` is the peak of the total."""

    weights: int  # as the compute reads them and as they are sent
    optimizer: int  # master weights and moments
    buffers: int  # gathers and reductions
    zeropp: int  # secondary shards, references of weight differences, residuals of gradients
    islands: int  # states of the outer optimizer
    gradients: int
    activations: int
    loss: int
    peak: int
    peak_at: str  # the part of a step
    cpu: int  # states and activations in CPU memory

    @property
    def resident(self) -> int:
        """Bytes that stay for the run."""
        return self.weights + self.optimizer + self.buffers + self.zeropp + self.islands

    def fits(self, gibibytes: float) -> bool:
        """Whether the peak leaves enough of a GPU's `gibibytes` for what a plan does not count."""
        return self.peak <= USABLE * gibibytes * 2**30


def memory_of(job: Job) -> Memory:
    """The memory of each rank, which is the same on all ranks; under Muon that of the rank with the most."""
    owned, offloaded, communication = job.owned, job.zero.zero_offload_optimizer, job.communication
    differences = communication.differences is not None  # on the GPU, from fp32 weights
    coded = differences or communication.weight_codes is not None
    master_bytes = 4 if offloaded or job.dtype.itemsize < 4 or coded else 0
    if job.optimizer.splits_weights:
        master_bytes = 1
    optimizer = int((job.optimizer.moment_bytes + master_bytes) * owned + _muon_bytes(job))
    staged = 0
    if offloaded and differences:
        staged = 4 * owned
    elif offloaded and job.coded:  # a unit at a time, to be encoded
        staged = 4 * max(len(weights.owned) for weights in communication.units)
    buffers = communication.arena_bytes
    if job.tensor > 1 and job.overlapped:  # what tensor ranks copy to each other
        buffers += region_bytes(job.tensor, job.rows, job.model.hidden_size, job.dtype)
    outer = 0
    if job.islands.takes_outer_steps:
        from megatron_zpp.plan.islands import state_bytes

        outer = state_bytes(job)
    parts = {
        "weights": communication.weight_bytes + staged,
        "optimizer": 0 if offloaded else optimizer,
        "buffers": buffers,
        "zeropp": communication.kept_bytes + communication.residual_bytes,
        "islands": 0 if offloaded else outer,
    }
    away = offloaded_bytes(job)
    activations, loss = stored_bytes(job) - away + ends_bytes(job), loss_bytes(job)
    candidates = _peak_candidates(job, activations, loss)
    peak_at, highest = max(candidates.items(), key=lambda item: item[1])
    source: float = job.dtype.itemsize % 4  # bytes per element of what gathers send, if not master weights
    if differences:  # computed from fp32 weights
        source = 0
    elif (quant_format := communication.weight_codes) is not None:
        source = quant_format.bytes_per_element
    pinned = (4 + source) * owned  # gradients copied in, weights copied out
    return Memory(
        **parts,
        gradients=_gradients(job, whole=False),
        activations=activations,
        loss=loss,
        peak=sum(parts.values()) + highest,
        peak_at=peak_at,
        cpu=away + (int(optimizer + pinned) + outer if offloaded else 0),
    )


def _muon_bytes(job: Job) -> float:
    """What a rank holds under Muon: rooms and moments of rows, less the second moments of its matrices."""
    second, itemsize = sum(job.optimizer.saved_bytes[2]), min(job.dtype.itemsize, 4)
    of_row = 0 if job.optimizer.muon_row_scaling_beta2 is None else 4
    held = (itemsize * each.rooms * each.room + of_row * each.rows for each in job.muon)
    return max((own - second * each.elements for own, each in zip(held, job.muon, strict=True)), default=0)


def _peak_candidates(job: Job, activations: int, loss: int) -> dict[str, int]:
    """Bytes of gradients, activations and temporary tensors at each point of a step that can be the peak."""
    accumulated = _gradients(job, whole=True) if job.micro_batches > 1 else 0
    in_backward = job.optimizer.optimizer_in_backward  # so no gradient stays when its unit has stepped
    final = 0 if in_backward else _gradients(job, whole=False)
    first, total = job.layouts[0].numel, sum(layout.numel for layout in job.layouts)
    others = int(final * (1 - first / total))  # without the embedding's
    table = job.dtype.itemsize * job.entries * job.model.hidden_size  # the head's gradient of it
    tied = 0 if job.model.untie_embeddings_and_output_weights else table
    of_layer = [layout.numel for layout in job.layer_layouts]
    most = 2 // len(of_layer)  # layers whose gradients are on their way: two units are
    sent = _sent_bytes(job)
    head = job.layouts[-1].numel
    on_their_way = int(sent * (most * sum(of_layer) + head))
    embedding = int(sent * first)
    from_before = 0  # since the last micro-batch
    if job.reduces_as_made and job.micro_batches > 1:
        from_before = on_their_way + embedding
    copied = [_copied_bytes(job, layout) if in_backward else 0 for layout in job.layer_layouts]
    candidates = {"the loss": accumulated + from_before + activations + loss}
    working = working_bytes(job)
    attention, mlp = attention_working_bytes(job), job.dtype.itemsize * _mlp_numel(job)
    backwards = []
    for one in backward(job):
        points = [
            (one.layer + 1, one.stored + working),
            # before the reduction takes them
            (one.layer, one.left + job.dtype.itemsize * of_layer[0] + copied[0]),
        ]
        # In the backward of attention the unit of a whole layer has the gradients of its MLP.
        both = max(attention, mlp + copied[1]) if len(of_layer) > 1 else attention + mlp
        points.append((one.layer + 1, one.left + attention_bytes(job) + both))
        for layers, live in points:
            done = int(others * (1 - layers / job.model.num_layers))
            later = min(job.model.num_layers - layers, most)  # from this backward: none when it starts
            beside = int(sent * (later * sum(of_layer) + head))
            backwards.append(max(accumulated, done) + live + tied + beside)
    candidates["the backward"] = max(backwards)
    produced = job.dtype.itemsize * first
    end = max(final + produced, others + produced + tied)
    if in_backward:
        end = max(end, produced + _copied_bytes(job, job.layouts[0]))
    if accumulated:  # complete when the embedding's two gradients are added
        end = accumulated + produced + max(tied, 0 if job.reduces_as_made else embedding)
    summing = _SUMMING * job.replicated[0]  # the embedding's gradients that tensor ranks have whole
    candidates["the end of the backward"] = end + on_their_way + summing
    made = max((each.working for each in job.muon), default=0)  # by Newton-Schulz
    candidates["the optimizer's step"] = final + min(job.dtype.itemsize, 4) * made
    return candidates


def _mlp_numel(job: Job) -> int:
    """Elements of the gradients of a layer's MLP, those of a whole layer without its vectors."""
    if len(job.layer_layouts) > 1:
        return job.layer_layouts[1].numel
    shape = layer_shape(job.model)
    return (shape.mlp_input.weights + shape.mlp_output.weights) // job.tensor


def _sent_bytes(job: Job) -> float:
    """Bytes per element that reductions under way keep in addition to `_gradients`.

    A gradient as it was made or, for a sum over micro-batches, its 16-bit copy or the shard that results.
    """
    reduce_bytes = job.reduced.gradient_dtype.itemsize
    if job.reduces_as_made:
        return min(job.dtype.itemsize, reduce_bytes)
    if not job.sums_gradients:
        return 0
    total = sum(layout.numel for layout in job.layouts)
    if job.owned < total:
        return 4 * job.owned / total
    return reduce_bytes if reduce_bytes < 4 else 0


def _gradients(job: Job, *, whole: bool) -> int:
    """Bytes of the optimizer's gradients, or (`whole`) of their sums between micro-batches."""
    if job.optimizer.optimizer_in_backward:
        return job.dtype.itemsize * max(layout.numel for layout in job.layouts)
    if not job.sums_gradients:
        return job.dtype.itemsize * job.owned  # on one rank
    accumulated = 4 * sum(each.accumulator_numel for each in job.communication.trained)  # over batches
    return accumulated if whole and accumulated else 4 * job.owned


def _copied_bytes(job: Job, layout: Layout) -> int:
    """Bytes of a unit's gradients that are copied into one buffer for its step on one rank."""
    small = (each.numel for each in layout.placements if each.numel < STEPPED_THERE)
    return job.dtype.itemsize * sum(small)


def copies_bytes(job: Job) -> int:
    """Bytes of a node's ranks for copies of the states that are saved, pinned if these are on GPUs.

    An offloaded optimizer has weights and moments on the CPU, and the reference on the GPU.
    """
    states = job.optimizer.saved_bytes if job.save_optim else job.optimizer.saved_bytes[:1]
    shards = [layout.shard_numel for layout in job.layouts]
    sizes = [int(nbytes * numel) for tensors in states for nbytes in tensors for numel in shards]
    copies = sum(sizes) if job.zero.zero_offload_optimizer else pinned_bytes(sizes)
    if job.save_optim and job.communication.differences is not None:
        copies += pinned_bytes(4 * numel for numel in shards)  # the reference
    return job.local * copies


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What pinned copies of tensors of these bytes take: torch rounds each up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)
