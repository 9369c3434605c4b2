"""Features of Megatron-LM that are not here, by the beginnings of the names of their flags.

Each flag that begins so is refused with the reason; the longest beginning counts.
"""

from megatron_zpp.config.legacy.old_flag import OldFlag

_DENSE = "the model is dense; omit it"
_ATTENTION = "attention is the usual one, with --group-query-attention; omit it"
_HYBRID = "all layers are attention and MLP; omit it"
_RL = "this program pretrains only; omit it"
_ADAM = "AdamW is the only optimizer; omit it"
_SERVED = "training generates no text; use megatron_zpp.commands.sample, which has flags of its own"
_OTHER = "the model is a GPT that reads text; omit it"
_FP4 = "the smallest format of the compute is --fp8; omit it"
_FAULTS = "tests inject faults; omit it"
_WEIGHTS = "every rank computes whole layers; use --zero-stage 3 to shard the model over ranks"
_OFFLOAD = "use --recompute-granularity full --recompute-offload"

FEATURES: dict[str, str] = {
    **dict.fromkeys(["--moe-", "--use-grouped-gemm-for-shared-expert"], _DENSE),
    **dict.fromkeys(
        ["--overlap-moe-", "--overlap-dispatch-", "--ep-overlap-", "--high-priority-a2a-"], _DENSE
    ),
    **dict.fromkeys(
        ["--expert-tensor-parallel-num-weight-shards", "--tensor-parallel-num-weight-shards"], _WEIGHTS
    ),
    **dict.fromkeys(["--gtp-", "--hybrid-context-parallel"], _WEIGHTS),
    **dict.fromkeys(
        ["--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim"], _ATTENTION
    ),
    **dict.fromkeys(["--qk-pos-emb-head-dim", "--v-head-dim", "--cache-mla-latents", "--mla-"], _ATTENTION),
    **dict.fromkeys(
        ["--experimental-attention-variant", "--dsa-", "--no-dsa-", "--disable-dsa-"], _ATTENTION
    ),
    **dict.fromkeys(["--linear-", "--attention-output-gate", "--qk-clip", "--qk-l2-norm"], _ATTENTION),
    **dict.fromkeys(["--window-", "--relative-attention-", "--no-rope-freq"], _ATTENTION),
    **dict.fromkeys(
        ["--yarn-", "--no-yarn-", "--mscale", "--rotary-scaling-factor"], "use --use-rope-scaling"
    ),
    **dict.fromkeys(["--mrope-section"], _OTHER),
    **dict.fromkeys(["--mamba-", "--disable-mamba-", "--gdp-", "--is-hybrid-model", "--hybrid-"], _HYBRID),
    **dict.fromkeys(["--heterogeneous-layers-", "--spec", "--enable-mhc-", "--mhc-", "--mtp-"], _HYBRID),
    **dict.fromkeys(
        ["--quick-geglu", "--activation-func-clamp-value"], "use --swiglu, --squared-relu or neither"
    ),
    **dict.fromkeys(["--use-mup", "--mup-"], "widths have no multipliers; set --lr and --init-method-std"),
    **dict.fromkeys(["--fp4-", "--kitchen-"], _FP4),
    **dict.fromkeys(["--sgd-", "--muon-", "--lion-"], _ADAM),
    **dict.fromkeys(["--perform-rl-", "--rl-", "--grpo-", "--langrl-", "--refit-method", "--sft"], _RL),
    **dict.fromkeys(["--logits-save-", "--logits-load-"], "nothing is distilled; omit it"),
    **dict.fromkeys(["--fim-"], "text is not rearranged; omit it"),
    **dict.fromkeys(["--inference-", "--decode-only-", "--enable-chunked-prefill"], _SERVED),
    **dict.fromkeys(["--num-speculative-tokens", "--use-same-sampling-seed-", "--mlp-chunks-"], _SERVED),
    **dict.fromkeys(["--bert-", "--output-bert-", "--ict-", "--biencoder-", "--titles-data-path"], _OTHER),
    **dict.fromkeys(["--query-in-block-prob", "--use-one-sent-docs", "--evidence-data-path"], _OTHER),
    **dict.fromkeys(["--retriever-", "--block-data-path", "--embedding-path", "--indexer-"], _OTHER),
    **dict.fromkeys(
        ["--num-classes", "--img-", "--num-channels", "--patch-dim", "--classes-fraction"], _OTHER
    ),
    **dict.fromkeys(
        ["--data-per-class-fraction", "--no-data-sharding", "--head-lr-mult", "--vision-"], _OTHER
    ),
    **dict.fromkeys(["--swin-", "--mask-", "--iter-per-epoch", "--dino-", "--decoder-num-layers"], _OTHER),
    **dict.fromkeys(["--decoder-seq-length", "--sample-rate", "--short-seq-prob"], _OTHER),
    **dict.fromkeys(["--non-persistent-"], "use --keep-last and --async-save"),
    **dict.fromkeys(["--ckpt-convert-"], "checkpoints have one format; omit it"),
    **dict.fromkeys(["--inprocess-"], "restart with launch/local.sh --max-restarts, which resumes; omit it"),
    **dict.fromkeys(["--fault-injector-"], _FAULTS),
    **dict.fromkeys(["--fine-grained-", "--offload-modules", "--min-offloaded-tensor-size"], _OFFLOAD),
    **dict.fromkeys(["--delay-offload-", "--delta-offload-", "--activation-offload-fraction"], _OFFLOAD),
    **dict.fromkeys(["--run-workload-inspector-server"], "there is no such server; omit it"),
}


def feature_flag(name: str) -> OldFlag | None:
    """Return the refused flag of a feature that `name` begins with; None for other names."""
    beginnings = [beginning for beginning in FEATURES if name.startswith(beginning)]
    if not beginnings:
        return None
    return OldFlag(name=name, otherwise=FEATURES[max(beginnings, key=len)])
