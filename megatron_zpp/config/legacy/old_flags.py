"""Flags of Megatron-LM and Megatron-DeepSpeed that are not current flags, and what happens to each.

Names and meanings are those of Megatron-LM from its first release to core 0.12 and of Megatron-DeepSpeed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OldFlag:
    """One flag, which takes one value of the type `takes`, or no value if that is None.

    gives      the values that it sets, by field path; VALUE stands for the value typed
    at_least   lower bounds that it asks for, by field path
    today      the current flag with the same meaning
    allowed    the values that it may have, which describe what happens anyway
    otherwise  what to do instead of another value; without `allowed` values the flag is refused
    why        the reason why the flag has no effect
    """

    name: str
    takes: type | None = None
    gives: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, int] = field(default_factory=dict)
    today: str = ""
    allowed: tuple[Any, ...] = ()
    why: str = ""
    otherwise: str = ""

    @property
    def refused(self) -> bool:
        """Whether the flag is refused with any value."""
        return bool(self.otherwise) and not self.allowed


VALUE = object()


def _renamed(name: str, today: str, field_path: str, takes: type | None = None) -> OldFlag:
    return OldFlag(name=name, takes=takes, gives={field_path: True if takes is None else VALUE}, today=today)


def _idle(why: str, *names: str, takes: type | None = None) -> list[OldFlag]:
    return [OldFlag(name=name, takes=takes, why=why) for name in names]


def _only(name: str, allowed: Any, otherwise: str, today: str = "") -> OldFlag:
    values = allowed if isinstance(allowed, tuple) else (allowed,)
    return OldFlag(name=name, takes=type(values[0]), allowed=values, otherwise=otherwise, today=today)


def _refused(otherwise: str, *names: str) -> list[OldFlag]:
    return [OldFlag(name=name, otherwise=otherwise) for name in names]


_FULL = {"recompute.recompute_granularity": "full"}
_UNIFORM = {"recompute.recompute_method": "uniform"}
_PP = "every rank computes all layers; use --zero-stage 3 to shard the model over ranks"
_LONG = "every rank computes whole samples; omit it"
_EXPERTS = "the model is dense; omit it"
_SEQUENCE = "with tensor parallelism, hidden states between linear maps are always split by tokens"
_NO_PP = "there is no pipeline parallelism"
_FUSED = "--attention-backend selects the attention kernel, and other fusions affect speed only"
_BUFFERS = "buffers hold one unit, such as a layer"
_FLAT = "gradients accumulate in flat buffers"
_OVERLAP = "gathers and reductions always overlap with computation"
_FEEDBACK = (
    "error feedback did not lower the loss (docs/internals/numerics.md); omit it, or use "
    "--zero-quantized-gradients-format rotated4"
)
_ENGINE = "the ZeRO engine is built in"
_SCHEDULE = "the schedule always follows the flags"
_TOKENS = "lengths are given in samples or iterations: divide by --seq-length and use the flag with -samples"

RENAMED = (
    _renamed("--batch-size", "--micro-batch-size", "training.micro_batch_size", int),
    _renamed(
        "--model-parallel-size",
        "--tensor-model-parallel-size",
        "distributed.tensor_model_parallel_size",
        int,
    ),
    _renamed("--warmup", "--lr-warmup-fraction", "learning_rate.lr_warmup_fraction", float),
    _renamed("--layernorm-epsilon", "--norm-epsilon", "model.norm_epsilon", float),
    _renamed("--encoder-seq-length", "--seq-length", "model.seq_length", int),
    OldFlag(
        name="--checkpoint-activations",
        gives=_FULL | _UNIFORM,
        today="--recompute-granularity full --recompute-method uniform",
    ),
    OldFlag(
        name="--activations-checkpoint-method",
        takes=str,
        gives=_FULL | {"recompute.recompute_method": VALUE},
        today="--recompute-granularity full --recompute-method",
    ),
    _renamed("--checkpoint-num-layers", "--recompute-num-layers", "recompute.recompute_num_layers", int),
    _renamed(
        "--activations-checkpoint-num-layers", "--recompute-num-layers", "recompute.recompute_num_layers", int
    ),
    _renamed("--checkpoint-granularity", "--recompute-granularity", "recompute.recompute_granularity", str),
    _renamed("--checkpoint-method", "--recompute-method", "recompute.recompute_method", str),
    _renamed("--checkpoint-in-cpu", "--recompute-offload", "recompute.recompute_offload"),
    _renamed("--cpu-optimizer", "--zero-offload-optimizer", "zero.zero_offload_optimizer"),
    _renamed("--optimizer-cpu-offload", "--zero-offload-optimizer", "zero.zero_offload_optimizer"),
    OldFlag(
        name="--use-rotary-position-embeddings",
        gives={"model.position_embedding_type": "rope"},
        today="--position-embedding-type rope",
    ),
    OldFlag(
        name="--use-distributed-optimizer",
        at_least={"zero.zero_stage": 1},
        today="--zero-stage 1; a higher stage includes it",
    ),
)

ONLY = (
    _only("--pipeline-model-parallel-size", 1, _PP),
    _only("--context-parallel-size", 1, _LONG),
    _only("--ds-sequence-parallel-size", 1, _LONG),
    _only("--expert-model-parallel-size", 1, _EXPERTS),
    _only("--moe-expert-parallel-size", 1, _EXPERTS),
    _only("--num-experts", 1, _EXPERTS),
    _only("--optimizer", "adam", "AdamW is the only optimizer; omit it"),
    _only("--dataloader-type", "single", "samples come in one seeded order; omit it"),
    _only("--data-impl", ("mmap", "infer"), "only .bin with .idx can be read; preprocess the data again"),
    _only("--remote-device", "none", "parameters stay on the GPU; use --zero-stage 3 with more ranks"),
    _only("--weight-decay-incr-style", "constant", "use --weight-decay"),
    _only("--tile-factor", 1, "linear layers are whole; use --zero-stage 3 to shard them"),
)

IDLE = (
    *_idle(_ENGINE, "--deepspeed", "--use-contiguous-buffers-in-ddp", "--no-contiguous-buffers-in-local-ddp"),
    *_idle(_ENGINE, "--DDP-impl", takes=str),
    *_idle("ranks come from the launcher's environment", "--local_rank", "--local-rank", takes=int),
    *_idle("--recompute-granularity selects recomputation", "--deepspeed-activation-checkpointing"),
    *_idle("--recompute-granularity selects recomputation, layer by layer", "--split-transformers"),
    *_idle("stored inputs of recomputation stay where they were computed", "--contigious-checkpointing"),
    *_idle("no layer waits for the device", "--synchronize-each-layer"),
    *_idle("only prints; use benchmarks/zero_speed.py --trace", "--profile-backward"),
    *_idle(_SEQUENCE, "--sequence-parallel", "--partition-activations"),
    *_idle(_SEQUENCE, "--distribute-checkpointed-activations", "--distribute-saved-activations"),
    *_idle(
        "activations are gathered and scattered, not all-reduced",
        "--no-async-tensor-model-parallel-allreduce",
    ),
    *_idle(_NO_PP, "--no-pipeline-parallel", "--no-scatter-gather-tensors-in-pipeline"),
    *_idle("every rank receives only its shard", "--zero-reduce-scatter"),
    *_idle(_FLAT, "--zero-contigious-gradients", "--no-gradient-accumulation-fusion"),
    *_idle(_BUFFERS, "--zero-reduce-bucket-size", "--zero-allgather-bucket-size", takes=float),
    *_idle("offloaded states are pinned", "--use-pin-memory"),
    *_idle("--fused-backend selects the AdamW implementation", "--cpu_torch_adam"),
    *_idle(_OVERLAP, "--overlap-grad-reduce", "--overlap-param-gather"),
    *_idle("gradients accumulate and are summed in fp32", "--accumulate-allreduce-grads-in-fp32"),
    *_idle(
        _FUSED, "--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--no-persist-layer-norm"
    ),
    *_idle(_FUSED, "--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--attention-softmax-in-fp32"),
    *_idle(_FUSED, "--transformer-impl", takes=str),
    *_idle("GELU is always the tanh approximation", "--no-bias-gelu-fusion", "--openai-gelu"),
    *_idle(_FUSED, "--no-rope-fusion", "--no-bias-swiglu-fusion"),
    *_idle("the result is the same", "--no-query-key-layer-scaling", "--apply-query-key-layer-scaling"),
    *_idle("there is only one model", "--use-mcore-models", "--use-legacy-models"),
    *_idle("initial weights depend on --seed only", "--use-cpu-initialization"),
    *_idle("order and dropout depend on --seed and consumed samples only", "--no-save-rng", "--no-load-rng"),
    *_idle("the first signal always saves and stops", "--exit-signal-handler"),
    *_idle("files are read as needed, not mapped", "--mmap-warmup"),
    *_idle(
        "checkpoints have one format, described in docs/internals/checkpoints.md", "--ckpt-format", takes=str
    ),
    *_idle(_SCHEDULE, "--override-lr-scheduler", "--override-opt_param-scheduler", "--no-load-lr-state"),
)

REFUSED = (
    *_refused("give the flags of the run that saved it", "--use-checkpoint-args"),
    *_refused(
        "set the schedule with flags", "--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"
    ),
    *_refused("norms come before attention and MLP; omit it", "--apply-residual-connection-post-layernorm"),
    *_refused("initial weights are normal; omit it", "--init-method-xavier-uniform"),
    *_refused(
        "rope pairs channels i and i + half a head; convert weights with interleaved pairs",
        "--rotary-interleaved",
    ),
    *_refused("use --use-rope-scaling", "--rotary-seq-len-interpolation-factor"),
    *_refused("the residual stream has the compute format; use --fp32", "--fp32-residual-connection"),
    *_refused("the loss is computed in fp32; omit it", "--fp16-lm-cross-entropy"),
    *_refused(_TOKENS, "--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens"),
    *_refused("use python -m megatron_zpp.commands.sample to generate text", "--ds-inference", "--inference"),
    *_refused("linear layers are whole; use --zero-stage 3 to shard them", "--memory-centric-tiled-linear"),
    *_refused("embeddings are whole; use --zero-stage 3 to shard them", "--scattered-embeddings"),
    *_refused(_FEEDBACK, "--zero-gradient-error-feedback"),
    *_refused(_PP, "--num-layers-per-virtual-pipeline-stage"),
    *_refused("weight decay is constant; use --weight-decay", "--start-weight-decay", "--end-weight-decay"),
)

OLD_FLAGS: tuple[OldFlag, ...] = (*RENAMED, *ONLY, *IDLE, *REFUSED)
