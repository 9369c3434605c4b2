"""Bytes of activations of one micro-batch on one GPU: those saved for the backward, and temporary ones.

Counts the tensors that autograd saves for the layers of model/layer.py on a GPU, where attention keeps its
inputs, its output and one number per row, never the square of the scores:

    a layer   its input, both norms' outputs, q, k, v, attention's output, the residual between attention and
              MLP, both sides of the activation (with SwiGLU gate and value, and unless the layer is compiled
              the SiLU of the gate); with --qk-layernorm q and k before their norms too; 8 bytes per token and
              LayerNorm, 4 per RMSNorm, of heads too if they are normalised; a byte for each number that
              dropout may drop
    the head  its input, the norm's output, and what model/loss.py works with and keeps (`loss_bytes`)

Tensor ranks divide all of a layer, by tokens between its linear maps and by heads or inner columns inside
them, and the logits by entries of the vocabulary. Each has the norm's output of all tokens in the head, and
for the length of a product the gathered rows of a linear map. 8-bit products keep these rows.

Where the MLP is in chunks, a layer saves the residual between attention and MLP, and of the MLP nothing more.

With delayed scaling the outputs of norms and activations are there as codes only, a byte each; attention's
output is kept beside its codes. Other 8-bit products are planned like those of bf16.

With --fp32-residual-connection the residual is in fp32 wherever it is kept, and its gradient; of the gradient
a half gets a copy in its format.

Context ranks that exchange heads keep attention's output twice, before its exchange and behind it, and where
they do not divide groups of heads, repeated keys and values.

Ids and the temporary memory of kernels do not count.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

from megatron_zpp.model.chunks import rows_of_chunk
from megatron_zpp.model.loss import chunk_rows, default_chunk_bytes, keeps_gradient
from megatron_zpp.model.recomputation import segments
from megatron_zpp.model.shape import LinearShape, layer_shape
from megatron_zpp.plan.job import Job

# Bytes per logit of a tensor rank, beside the logit, for its statistics and for its gradient
# (model/parallel/loss.py) without a compiler; by whether the compute format is narrower than fp32.
_PART_SOFTMAX = {True: (12, 9), False: (8, 9)}


@dataclass(frozen=True)
class LayerBackward:
    """The backward of layer `layer`, counted from 0: later layers are finished, earlier ones are not."""

    layer: int
    stored: int  # bytes
    left: int  # of `stored`, when the layer is finished


def layer_bytes(job: Job) -> int:
    """Return the bytes that one layer saves on a rank for its backward if it is not recomputed."""
    in_chunks = job.recompute.mlp_chunks_for_training > 1
    return attention_bytes(job) + (_input(job) if in_chunks else _mlp_bytes(job))


def attention_bytes(job: Job) -> int:
    """Return those bytes of the layer's first half, its attention."""
    shape = layer_shape(job.model)
    return _half_bytes(job, shape.qkv, shape.output) + job.rows * _heads_bytes(job)


def _mlp_bytes(job: Job) -> int:
    """Return those of the other half, if it is not in chunks."""
    shape = layer_shape(job.model)
    numbers = shape.mlp_input.outputs + shape.mlp_output.inputs
    if job.model.gated and not job.compiled:
        numbers += shape.mlp_output.inputs  # the activation of the gate
    if job.precision.fp8_delayed:
        numbers -= shape.mlp_output.inputs
    half = _half_bytes(job, shape.mlp_input, shape.mlp_output)
    return half + job.rows * numbers * job.dtype.itemsize


def _half_bytes(job: Job, first: LinearShape, second: LinearShape) -> int:
    """Return bytes of a half's input, norms, dropout and codes, whose linear maps are these two.

    Numbers per token are the input, and what each norm makes, or takes behind the half.
    """
    norms, codes = layer_shape(job.model).norms, _gathered_codes(job) // 2
    numbers = first.inputs + sum(norms) // 2
    if job.precision.fp8_delayed:  # codes of all rows of an input, and of a rank's columns of the other
        numbers -= first.inputs
        codes = first.inputs * job.tokens + second.inputs * job.rows
    statistics = len(norms) // 2 * _norm_bytes(job) + _masks(job)
    return job.rows * (numbers * job.dtype.itemsize + statistics) + codes + _wider(job)


def _heads_bytes(job: Job) -> int:
    """Return bytes per token of heads: q, k, v and attention's output, their norms, and a number per row."""
    shape = layer_shape(job.model)
    normalised = sum(count * width for count, width in shape.head_norms)
    statistics = sum(count for count, _ in shape.head_norms) * _norm_bytes(job)
    rows = 0 if job.recompute.recompute_granularity == "selective" else 4 * job.model.num_attention_heads
    numbers = shape.qkv.outputs + shape.output.inputs + normalised
    if _has_two_outputs(job):
        groups, tensor = job.model.num_query_groups, job.tensor
        repeated = tensor * math.lcm(groups // tensor, job.context) - groups
        numbers += shape.output.inputs + 2 * repeated * job.model.kv_channels
    return numbers * job.dtype.itemsize + statistics + rows


def _has_two_outputs(job: Job) -> bool:
    """Whether attention's output is kept on both sides of an exchange."""
    selective = job.recompute.recompute_granularity == "selective"
    return job.context > 1 and job.exchanges_heads and not selective


def ends_bytes(job: Job) -> int:
    """Return the bytes that the embedding and the head save, without the loss.

    The input of the loss, which is the norm's output, is that of all tokens.
    """
    norms = 1 + job.model.embed_layernorm
    vectors = (norms * job.rows + job.tokens) * job.model.hidden_size
    statistics = job.rows * (norms * _norm_bytes(job) + _masks(job))
    return vectors * job.dtype.itemsize + statistics + _wider(job)


def loss_bytes(job: Job, chunk_bytes: int | None = None) -> int:
    """The peak of the output layer, in its forward or its backward (model/loss.py).

    A chunk holds its logits in the compute format and, unless the model is compiled, their log-softmax in
    fp32, and fp32 logits where the compute format is another; tensor ranks hold more of the kind. In addition
    there is what the forward saves for the backward, or in the backward the gradients.
    """
    tokens, entries, width = job.tokens, job.entries, job.model.hidden_size
    itemsize, exact = job.dtype.itemsize, 4
    lean = job.compiled or job.tensor > 1
    chunk_bytes = chunk_bytes or default_chunk_bytes(entries, width, itemsize, lean=lean)
    if job.precision.fp8_output_layer:
        return _coded_loss_bytes(job, chunk_bytes)
    chunk = chunk_rows(tokens, entries, chunk_bytes) * entries
    softmax = chunk * _softmax_bytes(job, exact=itemsize == exact)
    gradients = (entries + tokens) * width
    if keeps_gradient(tokens, width, itemsize):
        kept = itemsize * tokens * entries
        return kept + max(softmax, itemsize * gradients)
    produced = 0 if itemsize == exact else itemsize * gradients
    return exact * gradients + max(itemsize * chunk + softmax, produced)


def _softmax_bytes(job: Job, *, exact: bool) -> int:
    """Bytes per logit of a chunk, beside logits that are fp32 or not; a compiler or a kernel needs none."""
    if job.compiled:
        return 0
    capped = job.model.final_logit_softcapping is not None
    if job.tensor > 1:
        statistics, gradient = _PART_SOFTMAX[not exact or capped]
        return max(statistics, gradient + 3 * capped)
    return 4 if exact and not capped else 8


def _coded_loss_bytes(job: Job, chunk_bytes: int) -> int:
    """The same of 8-bit products (model/fp8/output.py).

    Codes of the table and of a part's hidden states are there twice in the forward, and the codes of the
    gradient of a part's logits until its product with the hidden states.
    """
    tokens, entries, width = job.tokens, job.entries, job.model.hidden_size
    itemsize, exact = job.dtype.itemsize, 4
    from megatron_zpp.model.fp8.output import coded_chunk_rows, part_rows

    part = part_rows(tokens, width)
    chunk = coded_chunk_rows(part, entries, chunk_bytes) * entries
    softmax = chunk * _softmax_bytes(job, exact=True)
    if job.tensor > 1 or (itemsize < exact and not job.compiled):  # logits in fp32: no kernel writes codes
        softmax += chunk * exact
    of_x, gradient, table = itemsize * tokens * width, part * entries, entries * width
    working = 2 * (table + part * width) + (itemsize + 1) * chunk + softmax
    if part >= tokens:
        made = tokens * width + itemsize * table + of_x
        return gradient + of_x + max(working, made)
    sums, scaled = exact * table, 0 if itemsize == exact else itemsize * table
    added = gradient + max(working, 2 * (table + part * width) + exact * table)
    return sums + of_x + max(added, scaled + of_x)


def stored_bytes(job: Job) -> int:
    """Bytes that all layers save."""
    one, kept = layer_bytes(job), _input(job)
    runs = segments(job.model.num_layers, job.recompute)
    return sum(kept if recomputed else (stop - first) * one for first, stop, recomputed in runs)


def backward(job: Job) -> list[LayerBackward]:
    """The backward of each layer, last layer first. Activations that are then in CPU memory do not count."""
    one, kept, backwards = layer_bytes(job), _input(job), []
    runs = list(segments(job.model.num_layers, job.recompute))
    stored = [0, *accumulate(kept if again else (stop - first) * one for first, stop, again in runs)]
    for index, (first, stop, recomputed) in reversed(list(enumerate(runs))):
        before = stored[index]
        if job.recompute.recompute_offload:
            before = min(before, kept)  # that of the layer that is fetched next
        if recomputed:
            before += kept
        for layer in reversed(range(first, stop)):
            left = before + (layer - first) * one
            if recomputed and layer > first:
                left -= kept  # what was kept is the input of the recomputed layers
            backwards.append(LayerBackward(layer, left + one, left))
    return backwards


def working_bytes(job: Job) -> int:
    """Return bytes of gradients in the backward of a layer's MLP: activation, residual, one MLP matrix.

    Of an MLP in chunks there are the gradients of the residual on both sides of the half, and of both
    matrices the sums over chunks in fp32. Beside them are the gradients of a chunk, and either what it has
    saved or its gradient of the other matrix; or at the end the gradients of both matrices in their format.
    """
    chunks, itemsize = job.recompute.mlp_chunks_for_training, job.dtype.itemsize
    if chunks == 1:
        return _mlp_gradients(job, job.rows) + _wider(job) + _copy(job)
    shape, rows = layer_shape(job.model), rows_of_chunk(job.rows, chunks)
    saved = (_mlp_bytes(job) - _input(job)) * rows // job.rows
    first, second = (each.weights // job.tensor for each in (shape.mlp_input, shape.mlp_output))
    of_a_chunk = _mlp_gradients(job, rows) + max(saved, itemsize * second)
    made = itemsize * (first + second) if itemsize < 4 else 0
    return 2 * _input(job) + _copy(job) + 4 * (first + second) + max(of_a_chunk, made)


def _mlp_gradients(job: Job, rows: int) -> int:
    """Bytes of the gradients of `rows` rows of each rank: of the activation, the residual, one MLP matrix.

    Tensor ranks gather the residual's gradient for the MLP's second map. For its first map they gather the
    input and have their part of a product for all tokens, when what the second map and the activation had
    saved is gone.
    """
    hidden, tensor = job.model.hidden_size, job.tensor
    inner, tokens = layer_shape(job.model).mlp_input.outputs, rows * tensor
    second = rows * hidden + (tokens + hidden) * inner // tensor
    if tensor > 1:
        saved = tokens * (inner + job.model.ffn_hidden_size) // tensor
        first = second + (2 * tokens + rows) * hidden + hidden * inner // tensor - saved
        second = max(second + tokens * hidden, first)
    return job.dtype.itemsize * second


def attention_working_bytes(job: Job) -> int:
    """Return bytes of gradients in the backward of attention: residual, output, q, k, v.

    GPUs sum the gradient of q in fp32 before it gets its format. In a ring of context ranks the gradients of
    q, k and v are such sums, beside keys and values of another rank and their gradients. Of outputs that are
    there twice one is gone.
    """
    shape, itemsize = layer_shape(job.model), job.dtype.itemsize
    queries, heads = shape.output.inputs, shape.qkv.outputs
    if job.context > 1 and not job.exchanges_heads:
        around = max(2 * (heads - queries), heads)  # these, or the gradients in their format
        return _input(job) + _copy(job) + job.rows * (itemsize * (queries + around) + 4 * heads)
    sums = 4 * queries if job.device == "cuda" and itemsize < 4 else 0
    gone = queries if _has_two_outputs(job) else 0
    return _input(job) + _copy(job) + job.rows * (itemsize * (queries + heads - gone) + sums)


def offloaded_bytes(job: Job) -> int:
    """Bytes that --recompute-offload holds in CPU memory at the loss: all saved inputs except the newest."""
    return max(0, stored_bytes(job) - _input(job)) if job.recompute.recompute_offload else 0


def _input(job: Job) -> int:
    """Bytes of a rank's input of a layer."""
    return job.rows * job.model.hidden_size * job.dtype.itemsize + _wider(job)


def _wider(job: Job) -> int:
    """Of them, those that a residual in fp32 has beyond the compute format."""
    wide = job.model.fp32_residual_connection
    return wide * job.rows * job.model.hidden_size * (4 - job.dtype.itemsize)


def _copy(job: Job) -> int:
    """Bytes of the gradient of a residual in fp32 in the compute format."""
    return job.model.fp32_residual_connection * job.rows * job.model.hidden_size * job.dtype.itemsize


def _gathered_codes(job: Job) -> int:
    """Bytes that 8-bit products of tensor ranks keep beyond their own rows: codes of all rows of two maps."""
    if job.tensor == 1 or not job.precision.fp8:
        return 0
    return 2 * job.model.hidden_size * max(0, job.tokens - job.rows * job.dtype.itemsize)


def _norm_bytes(job: Job) -> int:
    """Return bytes per normalised vector: the deviation, and a LayerNorm's mean."""
    return 8 if job.model.normalization == "LayerNorm" else 4


def _masks(job: Job) -> int:
    return job.model.hidden_size if job.model.hidden_dropout else 0
