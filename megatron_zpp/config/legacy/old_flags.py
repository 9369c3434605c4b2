"""Flags of other programs, and of this program's past, that are obeyed, or have one possible value here.

reasons.py has those that are refused with any value, or have no effect. None of them is a current flag.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.config.legacy.reasons import EXPERTS, INJECTED, OPTIMIZERS, WEIGHT_DECAY
from megatron_zpp.config.options import flag_name


@dataclass(frozen=True, kw_only=True)
class OldFlag:
    """What is known of a flag, which takes one value of the type `takes`, or no value if that is None.

    many       whether it takes one value or more
    gives      the values that it sets, by field path; VALUE stands for the value typed
    at_least   lower bounds that it asks for, by field path
    samples    the field path that has its value divided by --seq-length
    means      what it gives for each of its values, instead of `gives`
    today      the current flag with the same meaning
    allowed    the values that it may have, which describe what happens anyway
    otherwise  why another value is refused, or what to do instead; without `allowed` values any is refused
    why        the reason why the flag has no effect
    computes   whether saved settings may have only `allowed` values of it too: the model depends on it
    """

    name: str
    takes: type | None = None
    many: bool = False
    gives: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, int] = field(default_factory=dict)
    samples: str = ""
    means: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    today: str = ""
    allowed: tuple[Any, ...] = ()
    why: str = ""
    otherwise: str = ""
    computes: bool = False

    def check_saved(self, place: str, value: Any) -> None:
        """Raise ValueError, naming `place`, for saved settings of a model that no longer exists."""
        if self.computes and value not in (None, *self.allowed):
            raise ValueError(f"{place} {value}: {self.otherwise}")

    def accepts(self, value: Any) -> bool:
        """Whether `value` is one that the flag may have, with each of several values."""
        return not self.allowed or all(one in self.allowed for one in (value if self.many else (value,)))

    @property
    def refused(self) -> bool:
        """Whether the flag is refused with any value."""
        return bool(self.otherwise) and not self.allowed


VALUE = object()


def renamed(name: str, settings: str | Mapping[str, Any], takes: type | None = None) -> OldFlag:
    """A flag that current ones say: that of a field path, or those of several, with their values."""
    if isinstance(settings, str):
        settings = {settings: True if takes is None else VALUE}
    today = [
        flag_name(path.partition(".")[2]) + ("" if value is True or value is VALUE else f" {value}")
        for path, value in settings.items()
    ]
    return OldFlag(name=name, takes=takes, gives=settings, today=" ".join(today))


def only(name: str, allowed: Any, otherwise: str, *, many: bool = False) -> OldFlag:
    """A flag that may have the `allowed` values only, or a single one."""
    values = allowed if isinstance(allowed, tuple) else (allowed,)
    return OldFlag(name=name, takes=type(values[0]), many=many, allowed=values, otherwise=otherwise)


def retired(name: str, value: Any, why: str, otherwise: str = "", *, computes: bool = False) -> OldFlag:
    """A flag of an earlier version that may only have one `value`, or none if that is a type."""
    takes, allowed = (value, ()) if isinstance(value, type) else (type(value), (value,))
    otherwise = otherwise or f"{why}; omit it"
    return OldFlag(name=name, takes=takes, allowed=allowed, why=why, otherwise=otherwise, computes=computes)


_FULL = {"recompute.recompute_granularity": "full"}
_FP32 = "not supported: master weights, moments or sums of gradients below fp32"
_NO_SNAPSHOTS = "states are copied to --save alone"
_BESIDE_MATMULS = "tensor ranks always exchange activations beside matmuls where their GPUs can"

RENAMED = (
    renamed("--batch-size", "training.micro_batch_size", int),
    OldFlag(
        name="--pipeline-model-parallel-size",
        takes=int,
        today="more data ranks, at the lowest --zero-stage that fits",
    ),
    renamed("--model-parallel-size", "distributed.tensor_model_parallel_size", int),
    renamed("--warmup", "learning_rate.lr_warmup_fraction", float),
    *(
        OldFlag(name=f"--{name}-tokens", takes=int, samples=path, today=f"--{name}-samples, / --seq-length")
        for name, path in (
            ("lr-decay", "learning_rate.lr_decay_samples"),
            ("lr-warmup", "learning_rate.lr_warmup_samples"),
        )
    ),
    renamed("--layernorm-epsilon", "model.norm_epsilon", float),
    renamed("--use-checkpoint-lr-scheduler", "checkpoint.use_checkpoint_opt_param_scheduler"),
    renamed("--use-checkpoint-opt_param-scheduler", "checkpoint.use_checkpoint_opt_param_scheduler"),
    renamed("--encoder-seq-length", "model.seq_length", int),
    renamed("--checkpoint-activations", _FULL | {"recompute.recompute_method": "uniform"}),
    renamed("--activations-checkpoint-method", _FULL | {"recompute.recompute_method": VALUE}, str),
    renamed("--checkpoint-num-layers", "recompute.recompute_num_layers", int),
    renamed("--activations-checkpoint-num-layers", "recompute.recompute_num_layers", int),
    renamed("--checkpoint-granularity", "recompute.recompute_granularity", str),
    renamed("--checkpoint-method", "recompute.recompute_method", str),
    renamed("--checkpoint-in-cpu", "recompute.recompute_offload"),
    renamed("--cpu-optimizer", "zero.zero_offload_optimizer"),
    renamed("--optimizer-cpu-offload", "zero.zero_offload_optimizer"),
    renamed("--rotary-position-embeddings-theta", "model.rotary_base", float),
    renamed(
        "--num-key-value-heads", {"model.group_query_attention": True, "model.num_query_groups": VALUE}, int
    ),
    renamed("--fp8-hybrid", "precision.fp8"),
    renamed("--ds-sequence-parallel-size", "distributed.context_parallel_size", int),
    renamed("--wandb_run_name", "logging.wandb_exp_name", str),
    renamed("--wandb_team", "logging.wandb_entity", str),
    renamed("--pad-vocab-size-to", "model.padded_vocab_size", int),
    renamed("--tokenizer-name-or-path", "tokenizer.tokenizer_model", str),
    renamed("--use-rotary-position-embeddings", {"model.position_embedding_type": "rope"}),
    OldFlag(
        name="--use-distributed-optimizer",
        at_least={"zero.zero_stage": 1},
        today="--zero-stage 1; a higher stage includes it",
    ),
    OldFlag(
        name="--data-parallel-sharding-strategy",
        takes=str,
        means={
            name: {"zero.zero_stage": stage}
            for stage, name in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params"))
        },
        today="--zero-stage",
    ),
    renamed("--use-torch-fsdp2", {"zero.zero_stage": 3}),
    renamed("--save-retain-interval", {"checkpoint.keep_last": 1, "checkpoint.keep_every": VALUE}, int),
    OldFlag(name="--fp8-format", takes=str, means={"hybrid": {"precision.fp8": True}}, today="--fp8"),
    renamed("--no-pad-vocab-size", {"model.make_vocab_size_divisible_by": 1}),
    renamed("--disable-pad-vocab-size", {"model.make_vocab_size_divisible_by": 1}),
    renamed("--encoder-num-layers", "model.num_layers", int),
    renamed("--muon-use-nesterov", "optimizer.muon_nesterov"),
    renamed("--mup-embedding-mult", "model.embedding_multiplier", float),
    renamed("--mup-output-mult", "model.logits_multiplier", float),
)

ONLY = (
    only("--expert-model-parallel-size", 1, EXPERTS),
    only("--moe-expert-parallel-size", 1, EXPERTS),
    only("--num-experts", 1, EXPERTS, many=True),
    only("--muon-scalar-optimizer", "adam", OPTIMIZERS),
    only(
        "--muon-tp-mode",
        ("duplicated", "distributed"),
        "not supported: matrices that each tensor rank makes orthogonal in part; omit it, and they are whole",
    ),
    only("--muon-fp32-matmul-prec", "medium", "Newton-Schulz runs in bf16, or in fp32 with --fp32"),
    only("--dataloader-type", "single", "not supported: cyclic and external data loaders"),
    only("--data-impl", ("mmap", "infer"), "only .bin with .idx can be read; preprocess the data again"),
    only("--remote-device", "none", "not supported: parameters in CPU memory or on disks"),
    only("--weight-decay-incr-style", "constant", WEIGHT_DECAY),
    only("--num-distributed-optimizer-instances", 1, "use --zero-stage and --zero-hpz-partition-size"),
    only("--outer-dp-sharding-strategy", "no_shard", "use --zero-stage"),
    only("--rope-type", "rope", "use --position-embedding-type yarn"),
    only("--recompute-modules", "core_attn", "use --recompute-granularity", many=True),
    only("--error-injection-rate", 0, INJECTED),
    only("--vocab-extra-ids", 0, "not supported: entries beside the tokenizer's; use --padded-vocab-size"),
    only("--glu-linear-offset", 0.0, "not supported: an offset in the GLU"),
    only("--main-grads-dtype", "fp32", _FP32),
    only("--megatron-fsdp-main-params-dtype", ("fp32", "auto"), _FP32),
    only("--megatron-fsdp-main-grads-dtype", ("fp32", "auto"), _FP32),
    only("--megatron-fsdp-grad-comm-dtype", "auto", "use --grad-reduce-in-bf16, or omit it"),
    only(
        "--exit-signal", ("SIGTERM", "SIGUSR1", "SIGINT"), "not supported: other signals; these save and stop"
    ),
    only("--no-weight-decay-cond-type", "default", "not supported: other choices of what is decayed"),
)

RETIRED = (  # flags of this program, whose fields may be in settings files and in checkpoints
    retired("--gemm-algorithms", "heuristic", "torch always chooses the algorithms of matmuls"),
    retired("--fp8-products", "always", "--fp8 always computes the matmuls of layers on 8-bit floats"),
    retired("--fp8-margin", 0, "the largest magnitude of --fp8-recipe delayed always has the largest code"),
    *(
        OldFlag(name=name, takes=takes, why=why)
        for name, takes, why in (
            ("--tp-comm-overlap", None, _BESIDE_MATMULS),
            ("--no-tp-comm-overlap", None, _BESIDE_MATMULS),
            ("--compile-cache-dir", str, "TORCHINDUCTOR_CACHE_DIR names the cache of compiled kernels"),
            ("--profile-dir", str, "traces are in profile, below --tensorboard-dir if that is given"),
            ("--log-num-zeros-in-grad", None, "zeros of the gradient are not counted"),
            ("--device-peak-tflops", float, "MFU is relative to the data sheet of a known GPU"),
            ("--preflight-timeout", float, "--distributed-timeout-minutes holds for the start too"),
            ("--zero-copy-engines", str, "copy engines are used if a trial at the start succeeds"),
            ("--zero-spare-multiprocessors", str, "matmuls always spare what NCCL needs over TCP"),
            ("--zero-check-interval", int, "references are compared before each checkpoint is saved"),
            ("--distributed-backend", str, "collectives are NCCL's on GPUs, and gloo's on CPUs"),
            ("--debug", None, "MEGATRON_ZPP_DEBUG=1 in the environment shows tracebacks"),
        )
    ),
    retired("--zero-hpz-secondary", "bf16", "secondary shards always have the compute format"),
    retired("--zero-delta4-iterations", int, "delta4 has 4 bits in all iterations"),
    *(
        retired(
            name,
            value,
            "--use-rope-scaling always has this value",
            "not supported: scaling of rope other than Llama 3's",
            computes=True,
        )
        for name, value in (
            ("--rope-low-freq-factor", 1.0),
            ("--rope-high-freq-factor", 4.0),
            ("--rope-original-max-position-embeddings", 8192),
        )
    ),
    retired("--sample-tokens", 64, "a sampled text always has 64 tokens"),
    retired("--wandb-mode", str, "the environment variable WANDB_MODE sets it"),
    retired("--plan-compute-share", float, "a plan takes and prints the share of the peak of its GPU"),
    retired("--max-nan-iterations", 10, "10 steps in a row with NaN or Inf always end a run"),
    retired("--buddy-snapshots", int, _NO_SNAPSHOTS),
    retired("--buddy-directory", str, _NO_SNAPSHOTS),
    retired(
        "--zero-table-rows",
        int,
        "tables of the vocabulary are whole",
        "omit it; the loss is computed in chunks of tokens, and --tensor-model-parallel-size or "
        "--recompute-granularity full saves memory",
    ),
    retired(
        "--zero-quantization-block", 256, "blocks have 256 elements, and those of unrotated gradients 128"
    ),
    retired("--nccl-sockets", "auto", "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD set NCCL's sockets"),
)
RETIRED_FIELDS = {flag.name[2:].replace("-", "_"): flag for flag in RETIRED}
OTHER_VALUES = {  # by flag: what says here what a value of another program says there
    "--position-embedding-type": {"rotary": "rope", "absolute": "learned_absolute"},
    "--optimizer": {"dist_muon": "muon"},
    "--tokenizer-type": dict.fromkeys(("PretrainedFromHF", "HFTokenizer"), "HuggingFaceTokenizer"),
}
REFUSED_VALUES = {
    "--optimizer": dict.fromkeys(("sgd", "lion", "soap"), OPTIMIZERS)
    | {"adaptive_muon": "not supported: AdaMuon; NorMuon is --optimizer muon --muon-row-scaling-beta2 0.95"},
    "--position-embedding-type": {
        "mrope": "not supported: multimodal rope",
        "relative": "not supported: relative positions",
    },
    "--tokenizer-type": {
        "BertWordPieceLowerCase": "not supported: WordPiece",
        "BertWordPieceCase": "not supported: WordPiece",
        "TikTokenizer": "not supported: tiktoken",
    },
}
RETIRED_VALUES = {  # by field: the value that takes the place of each
    "zero_quantized_weights_format": {"fp8": "int8", "int4": "int8", "delta3": "delta4", "delta2": "delta4"},
    "zero_quantized_gradients_format": {"fp8": "int8", "rotated3": "rotated4"},
}

OLD_FLAGS: tuple[OldFlag, ...] = (*RENAMED, *ONLY, *RETIRED)
