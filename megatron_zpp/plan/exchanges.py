"""What a rank sends to the ranks that share its layers or samples, and how long it waits for them.

model/parallel/layers.py has the collectives. For T ranks, one of them on the hidden states of a micro-batch
makes each rank send (T - 1) / T of their bytes over NVLink:

    a layer         forward    an all-gather before each of two linear maps, a reduce-scatter after two others
                    backward   the transposes of these four, and the two inputs gathered again for the
                               gradients of weights, unless 8-bit products have kept them; with
                               recomputation, or an MLP in chunks, also what the forward sends
                    norms across heads sum an fp32 number per token, of a LayerNorm two, in the forward, and
                    as many in the backward
    the embedding   a reduce-scatter, and in the backward an all-gather
    the head        an all-gather, and in the backward a reduce-scatter; three fp32 numbers per token for the
                    softmax
    all layers      in the backward an all-reduce of the gradients of norms, biases and positions, in fp32

A rank waits for all of these, except in the backward of a map whose input is gathered: the input arrives
beside the product for the input's gradient, which is scattered beside the product for the weight's. With
copies between GPUs the other exchanges of maps are beside products too, of all tokens but 1 / T.

Context ranks exchange what attention needs, in each layer's forward and backward, and once more where either
is recomputed (model/context/): heads by all-to-all, for which a rank waits, or keys and values around a ring,
beside attention to those that have arrived.
"""

from dataclasses import dataclass

from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.context.sharing import context_kernel, exchanges_of_attention
from megatron_zpp.model.flops import attended_tokens, layer_matrices
from megatron_zpp.model.recomputation import mlps_again, segments
from megatron_zpp.model.shape import layer_shape
from megatron_zpp.plan.hardware import ATTENTION_CHANNELS, ATTENTION_MARGIN, ATTENTION_RATE, Machine
from megatron_zpp.plan.job import Job, UnconnectedGroup

_STATISTICS = 3 * 4  # bytes per token: fp32 maximum, sum of exponentials, target's logit


@dataclass(frozen=True)
class Exchanged:
    """Bytes that one rank sends to tensor and context ranks in a forward or a backward of a micro-batch."""

    waited: int  # while it has nothing to compute
    beside: int  # beside products
    around: int  # beside attention
    uncounted: int  # of all of them: no hidden states and heads, which alone a run's ledger counts

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.waited + self.beside + self.around


def exchanged(job: Job, forward: bool) -> Exchanged:
    """What one forward or backward exchanges; nothing without tensor and context ranks."""
    others, layers = job.tensor - 1, job.model.num_layers
    one = others * job.rows * job.model.hidden_size * job.dtype.itemsize  # a collective on hidden states
    if forward:
        uncounted = others * _STATISTICS * job.tokens + _norm_bytes(job, layers)
        of_maps, beside = 4 * layers * one, 0
    else:
        uncounted = 2 * others * 4 * sum(job.replicated) // job.tensor
        uncounted += _norm_bytes(job, layers + recomputed_layers(job))
        again = 4 * recomputed_layers(job) + 2 * recomputed_mlps(job)
        of_maps = (again + (4 if job.precision.fp8 else 2) * layers) * one
        beside = 0 if job.precision.fp8 else 4 * layers * one
    ends, of_attention = 2 * one + uncounted, context_bytes(job, forward)
    waited, beside = (ends, beside + of_maps) if job.overlapped else (ends + of_maps, beside)
    if job.exchanges_heads:
        return Exchanged(waited + of_attention, beside, 0, uncounted)
    return Exchanged(waited, beside, of_attention, uncounted)


def context_bytes(job: Job, forward: bool) -> int:
    """Of these, what context ranks send each other, the mean of theirs."""
    if job.context == 1:
        return 0
    sent, model, heads = 0, job.model, job.model.num_attention_heads // job.tensor
    selective = job.recompute.recompute_granularity == "selective"
    for rank in range(job.context):
        group = UnconnectedGroup(job.context, rank)
        kernel = context_kernel(DotProduct(), group, job.comm_type, heads)
        layers = exchanges_of_attention(model, kernel, job.tensor, selective=selective)
        sent += sum(there if forward else back for there, back in layers)
        if not forward:
            runs = segments(model.num_layers, job.recompute)
            sent += sum(there for first, stop, again in runs if again for there, _ in layers[first:stop])
    return sent * job.tokens * job.dtype.itemsize // job.context


def exchanged_bytes(job: Job) -> int:
    """Bytes that one rank sends to its tensor and context ranks in a step."""
    return job.micro_batches * sum(exchanged(job, forward).nbytes for forward in (True, False))


def hidden_state_bytes(job: Job) -> int:
    """Of `exchanged_bytes`, those of hidden states and heads: the ledger of a run counts no others."""
    passes = [exchanged(job, forward) for forward in (True, False)]
    return job.micro_batches * sum(each.nbytes - each.uncounted for each in passes)


def _norm_bytes(job: Job, layers: int) -> int:
    """Those of norms across heads, in one pass through `layers`."""
    if not job.model.qk_layernorm_across_heads:
        return 0
    numbers = 2 * (2 if job.model.normalization == "LayerNorm" else 1)  # of queries and of keys
    return 2 * (job.tensor - 1) * 4 * numbers * job.tokens // job.tensor * layers


def ledgers_of(job: Job, sent: SentBytes) -> SentBytes:
    """What the ledgers of all ranks count in a step in which ZeRO has `sent` this."""
    inside = job.ranks * hidden_state_bytes(job) + job.nodes * _muon_bytes(job)
    return SentBytes(sent.intra + inside, sent.inter)


def _muon_bytes(job: Job) -> int:
    """Bytes that the ranks of a node send each other of matrices under Muon, and of moments of rows."""
    return sum(job.dtype.itemsize * each.sent + job.row_moments_sent for each in job.muon)


def waiting_seconds(job: Job, machine: Machine, forward: bool) -> float:
    """Seconds of one forward or backward in which a rank waits for its tensor and context ranks."""
    sent, products = exchanged(job, forward), _products(job, machine, forward)
    waited = sent.waited / machine.inside + max(0.0, sent.beside / machine.inside - products)
    return waited + max(0.0, sent.around / machine.inside - _scores(job, machine, forward))


def recomputed_layers(job: Job) -> int:
    """Layers whose forward a backward repeats."""
    runs = segments(job.model.num_layers, job.recompute)
    return sum(stop - first for first, stop, again in runs if again)


def recomputed_mlps(job: Job) -> int:
    """Layers beside these whose MLP is computed again in the backward, because it is in chunks.

    A recomputation that leaves out an MLP, which its chunks compute, counts as one of the whole layer.
    """
    return len(mlps_again(job.model.num_layers, job.recompute))


def recomputed_matrices(job: Job) -> int:
    """Parameters of the matrices of layers with which a backward repeats a forward."""
    shape = layer_shape(job.model)
    of_mlp = shape.mlp_input.weights + shape.mlp_output.weights
    return recomputed_layers(job) * layer_matrices(job.model) + recomputed_mlps(job) * of_mlp


def _products(job: Job, machine: Machine, forward: bool) -> float:
    """Seconds of the products beside which one forward or backward exchanges.

    These are two in the backward of a map whose input is gathered, and of other exchanges none, or with
    copies between GPUs those of all ranks' tokens but one's.
    """
    model, layers = job.model, job.model.num_layers
    shape, others = layer_shape(model), 1 - 1 / job.tensor if job.overlapped else 0.0
    column, row = shape.qkv.outputs + shape.mlp_input.outputs, shape.output.inputs + shape.mlp_output.inputs
    if forward:
        width = others * (column + row) * layers
    else:
        again = (column + row) * recomputed_layers(job)
        again += (shape.mlp_input.outputs + shape.mlp_output.inputs) * recomputed_mlps(job)
        width = 2 * column * layers + others * (row * layers + again)
    return 2.0 * job.tokens * model.hidden_size * width / job.tensor / machine.flops


def _scores(job: Job, machine: Machine, forward: bool) -> float:
    """Seconds of attention to the keys of other context ranks in one forward or backward."""
    flops = (1 if forward else 2) * attention_flops(job) * (1 - 1 / job.context)
    return job.tokens * flops / job.tensor / machine.flops


def attention_flops(job: Job, *, counted: bool = False) -> float:
    """FLOPs per token of a forward's attention: as many as take its time, or `counted` as PaLM does."""
    model, length = job.model, job.model.seq_length
    tokens = float(attended_tokens(model))
    if not counted:
        windows = (min(window or length, length) for window in model.layer_windows)
        computed = sum(window - window**2 / (2 * length) + ATTENTION_MARGIN for window in windows)
        tokens = computed * (1 + ATTENTION_CHANNELS / model.kv_channels) / ATTENTION_RATE
    return 4.0 * layer_shape(model).output.inputs * tokens
