"""Features of Megatron-LM that are not here, by the beginnings of the names of their flags.

Each flag that begins so is refused with the reason; the longest beginning counts.
"""

from megatron_zpp.config.legacy.old_flag import OldFlag

_REASONS = {
    "the model is dense; omit it": """--moe- --use-grouped-gemm-for-shared-expert --overlap-moe-
        --overlap-dispatch- --ep-overlap- --high-priority-a2a-""",
    "every rank computes whole layers; use --zero-stage 3 to shard the model over ranks": """
        --expert-tensor-parallel-num-weight-shards --tensor-parallel-num-weight-shards --gtp-
        --hybrid-context-parallel""",
    "attention is the usual one, with --group-query-attention; omit it": """--multi-latent-attention
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --cache-mla-latents
        --mla- --experimental-attention-variant --dsa- --no-dsa- --disable-dsa- --linear-
        --attention-output-gate --qk-clip --qk-l2-norm --window- --relative-attention- --no-rope-freq""",
    "use --use-rope-scaling": "--yarn- --no-yarn- --mscale --rotary-scaling-factor",
    "the model is a GPT that reads text; omit it": """--mrope-section --bert- --output-bert- --ict-
        --biencoder- --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path
        --retriever- --block-data-path --embedding-path --indexer- --num-classes --img- --num-channels
        --patch-dim --classes-fraction --data-per-class-fraction --no-data-sharding --head-lr-mult --vision-
        --swin- --mask- --iter-per-epoch --dino- --decoder-num-layers --decoder-seq-length --sample-rate
        --short-seq-prob""",
    "all layers are attention and MLP; omit it": """--mamba- --disable-mamba- --gdp- --is-hybrid-model
        --hybrid- --heterogeneous-layers- --spec --enable-mhc- --mhc- --mtp-""",
    "use --swiglu, --squared-relu or neither": "--quick-geglu --activation-func-clamp-value",
    "widths have no multipliers; set --lr and --init-method-std": "--use-mup --mup-",
    "the smallest format of the compute is --fp8; omit it": "--fp4- --kitchen-",
    "AdamW is the only optimizer; omit it": "--sgd- --muon- --lion-",
    "this program pretrains only; omit it": "--perform-rl- --rl- --grpo- --langrl- --refit-method --sft",
    "nothing is distilled; omit it": "--logits-save- --logits-load-",
    "text is not rearranged; omit it": "--fim-",
    "training generates no text; use megatron_zpp.commands.sample, which has flags of its own": """
        --inference- --decode-only- --enable-chunked-prefill --num-speculative-tokens
        --use-same-sampling-seed- --mlp-chunks-""",
    "use --keep-last and --async-save": "--non-persistent-",
    "checkpoints have one format; omit it": "--ckpt-convert-",
    "restart with launch/local.sh --max-restarts, which resumes; omit it": "--inprocess-",
    "tests inject faults; omit it": "--fault-injector-",
    "use --recompute-granularity full --recompute-offload": """--fine-grained- --offload-modules
        --min-offloaded-tensor-size --delay-offload- --delta-offload- --activation-offload-fraction""",
    "there is no such server; omit it": "--run-workload-inspector-server",
}
FEATURES = {beginning: reason for reason, names in _REASONS.items() for beginning in names.split()}


def feature_flag(name: str) -> OldFlag | None:
    """Return the refused flag of a feature that `name` begins with; None for other names."""
    beginnings = [beginning for beginning in FEATURES if name.startswith(beginning)]
    if not beginnings:
        return None
    return OldFlag(name=name, otherwise=FEATURES[max(beginnings, key=len)])
