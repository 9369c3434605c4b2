"""Features of other programs that are not here, by how the names of their flags begin.

Each flag that matches is refused with the name of its feature, or has no effect if it cannot change a result.
The longest pattern counts. Such flags need no row of their own, so that new ones of a feature are known too.
"""

from fnmatch import fnmatchcase

EXPERTS = "not supported: mixture of experts"
CURRICULUM = "not supported: curriculum learning"
DISTILLATION = "not supported: distillation"
OPTIMIZERS = "not supported: optimizers other than AdamW and Muon"

_REASONS = {
    EXPERTS: """--moe-* --use-grouped-gemm-for-shared-expert --overlap-moe-* --overlap-dispatch-*
        --ep-overlap-* --high-priority-a2a-*""",
    "not supported: ranks that share layers in other ways than --tensor-model-parallel-size": """
        --expert-tensor-parallel-num-weight-shards --tensor-parallel-num-weight-shards --gtp-*
        --hybrid-context-parallel*""",
    "not supported: multi-latent attention": """--multi-latent-attention --q-lora-rank --kv-lora-rank
        --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --cache-mla-latents --mla-*""",
    "not supported: other kinds of attention": """--experimental-attention-variant --dsa-* --no-dsa-*
        --disable-dsa-* --linear-* --attention-output-gate --qk-clip* --qk-l2-norm --window-*""",
    "not supported: relative positions": "--relative-attention-*",
    "not supported: models other than a GPT that reads text": """--mrope-section --bert-* --output-bert-*
        --ict-* --biencoder-* --titles-data-path --query-in-block-prob --use-one-sent-docs
        --evidence-data-path --retriever-* --block-data-path --embedding-path --indexer-* --num-classes
        --img-* --num-channels --patch-dim --classes-fraction --data-per-class-fraction --no-data-sharding
        --head-lr-mult --vision-* --swin-* --mask-* --iter-per-epoch --dino-* --decoder-num-layers
        --decoder-seq-length --sample-rate --short-seq-prob""",
    "not supported: layers other than attention and MLP": """--mamba-* --disable-mamba-* --gdp-*
        --is-hybrid-model --hybrid-* --heterogeneous-layers-* --spec --enable-mhc-* --mhc-*""",
    "not supported: prediction of several tokens": "--mtp-*",
    "not supported: gated activations other than --swiglu and --geglu": """--quick-geglu --glu-activation
        --activation-func-clamp-value""",
    "use --use-mup with --mup-base-hidden-size": "--mup",
    "use --embedding-multiplier": "--mup-input-mult",
    "use --softmax-scale": "--mup-attn-mult",
    "not supported: products below 8 bits": "--fp4-* --kitchen-*",
    OPTIMIZERS: "--sgd-* --lion-* --soap-* --adaptive-muon-*",
    "not supported: reinforcement learning and instruction tuning": """--perform-rl-* --rl-* --grpo-*
        --langrl-* --refit-method --sft*""",
    DISTILLATION: "--logits-save-* --logits-load-*",
    "not supported: filling in the middle": "--fim-*",
    "use --keep-last and --async-save": "--non-persistent-*",
    "not supported: checkpoints in other formats": "--ckpt-convert-*",
    "restart with launch/local.sh --max-restarts, which resumes": "--inprocess-*",
    "not supported: injected errors": "--fault-injector-*",
    "use --recompute-granularity full --recompute-offload": """--fine-grained-* --offload-modules
        --min-offloaded-tensor-size --delay-offload-* --delta-offload-* --activation-offload-fraction""",
}
_IDLE = {
    "training generates no text; megatron-zpp sample has flags of its own": """--inference-*
        --decode-only-* --enable-chunked-prefill --num-speculative-tokens --use-same-sampling-seed-*
        --mlp-chunks-for-prefill""",
    "only reports": """--log-*-to-tensorboard --profile-* --timing-* --codecarbon-* --record-memory-*
        --memory-snapshot-* --run-workload-inspector-server*""",
}


def _by_pattern(names: dict[str, str]) -> dict[str, str]:
    return {pattern: reason for reason, patterns in names.items() for pattern in patterns.split()}


_REFUSED_PATTERNS, _IDLE_PATTERNS = _by_pattern(_REASONS), _by_pattern(_IDLE)


def feature_of(name: str) -> tuple[str, bool] | None:
    """Return (reason, whether it is refused) of a flag without a row; None if it is of no known feature."""
    patterns = [each for each in (_REFUSED_PATTERNS | _IDLE_PATTERNS) if fnmatchcase(name, each)]
    if not patterns:
        return None
    longest = max(patterns, key=len)
    refused = longest in _REFUSED_PATTERNS
    return (_REFUSED_PATTERNS if refused else _IDLE_PATTERNS)[longest], refused
