"""Bytes that a forward leaves for its backward, and what either takes beside: of one micro-batch on one GPU.

Counted are the tensors that autograd saves of model/gpt.py on a GPU, where attention keeps its inputs, its
output and one number a row, never the square of the scores:

    a layer   its input, both norms' outputs, q, k, v, the mixed heads, what comes between attention and MLP,
              both sides of the GELU; 8 bytes a token and norm; a byte for each number that dropout may drop
    the head  its input, the norm's output, and what model/loss.py works with and keeps (`loss_bytes`)

Ids, and what kernels take for an instant, are left out.
"""

from dataclasses import dataclass

from megatron_zpp.model.gpt import segments
from megatron_zpp.model.loss import CHUNK_BYTES, LEAN_CHUNK_BYTES, chunk_rows, keeps_gradient
from megatron_zpp.plan.job import Job

_NORM = 8  # bytes a token: mean and deviation


@dataclass(frozen=True)
class Moment:
    """The backward of layer `layer`, counted from 0: all behind it are done, and all before it are not."""

    layer: int
    stored: int
    left: int  # of that when the layer is done


def layer_bytes(job: Job) -> int:
    """What one layer that is not recomputed leaves for its backward."""
    model = job.model
    width = model.num_attention_heads * model.kv_channels
    numbers = 4 * model.hidden_size + 4 * width + 2 * model.ffn_hidden_size
    exact = 2 * _NORM + (2 * model.hidden_size if model.hidden_dropout else 0)
    if job.recompute.recompute_granularity != "selective":
        exact += 4 * model.num_attention_heads
    return job.tokens * (numbers * job.dtype.itemsize + exact)


def ends_bytes(job: Job) -> int:
    """What the embedding and the head leave, but for the loss."""
    model = job.model
    return job.tokens * (2 * model.hidden_size * job.dtype.itemsize + _NORM + _masks(job))


def loss_bytes(job: Job, chunk_bytes: int | None = None) -> int:
    """What the output layer takes at most, in its forward or its backward: see model/loss.py.

    A chunk has its logits in the compute format and, but for compiled models, twice in fp32: as they are,
    where they are not, and their log-softmax. Beside it is what waits for the backward, and in that the
    gradients that come of it.
    """
    tokens, entries, width = job.tokens, job.padded_vocab_size, job.model.hidden_size
    itemsize, exact = job.dtype.itemsize, 4
    chunk_bytes = chunk_bytes or (LEAN_CHUNK_BYTES if job.compiled else CHUNK_BYTES)
    chunk = chunk_rows(tokens, entries, chunk_bytes) * entries
    softmax = 0 if job.compiled else chunk * (exact if itemsize == exact else 2 * exact)
    gradients = (entries + tokens) * width
    if keeps_gradient(tokens, width, itemsize):
        kept = itemsize * tokens * entries
        return kept + max(softmax, itemsize * gradients)
    produced = 0 if itemsize == exact else itemsize * gradients
    return exact * gradients + max(itemsize * chunk + softmax, produced)


def stored_bytes(job: Job) -> int:
    """What all layers leave together."""
    return sum(_kept(job, *segment) for segment in segments(job.model.num_layers, job.recompute))


def backward(job: Job) -> list[Moment]:
    """The backward of each layer, the last one first. What is offloaded then does not count."""
    one, moments = layer_bytes(job), []
    runs = list(segments(job.model.num_layers, job.recompute))
    for index, (first, stop, recomputed) in reversed(list(enumerate(runs))):
        before = sum(_kept(job, *run) for run in runs[:index])
        if job.recompute.recompute_offload:
            before = min(before, _input(job))  # the one that comes back next
        if recomputed:
            before += _kept(job, *runs[index])
        for layer in reversed(range(first, stop)):
            left = before + (layer - first) * one
            if recomputed and layer > first:
                left -= _input(job)  # what was kept is the run's input
            moments.append(Moment(layer, left + one, left))
    return moments


def working_bytes(job: Job) -> int:
    """Gradients within a layer's backward: of the GELU's output, the residual, one of the MLP's matrices."""
    hidden, inner = job.model.hidden_size, job.model.ffn_hidden_size
    return job.dtype.itemsize * (job.tokens * (hidden + inner) + hidden * inner)


def offloaded_bytes(job: Job) -> int:
    """What --recompute-offload has in CPU memory at the loss: all that is stored but the newest."""
    return max(0, stored_bytes(job) - _input(job)) if job.recompute.recompute_offload else 0


def _kept(job: Job, first: int, stop: int, recomputed: bool) -> int:
    """Of a run of layers."""
    return _input(job) if recomputed else (stop - first) * layer_bytes(job)


def _input(job: Job) -> int:
    """Of a layer."""
    return job.tokens * job.model.hidden_size * job.dtype.itemsize


def _masks(job: Job) -> int:
    return job.model.hidden_size if job.model.hidden_dropout else 0
