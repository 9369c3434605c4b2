"""Flags of other programs that are refused here or have no effect, by the reason.

They are flags of Megatron-LM from its first release to today, of Megatron-DeepSpeed and its fork by
BigScience, and of GPT-NeoX's launcher. None of them is a current flag. A pattern with `*` is for a feature,
whose new flags are known then too. `--flag:` takes values, and `--flag` none.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

EXPERTS = "not supported: mixture of experts"
CURRICULUM = "not supported: curriculum learning"
OPTIMIZERS = "not supported: optimizers other than AdamW and Muon"
FEEDBACK = (
    "not supported: error feedback, which did not lower the loss (docs/internals/numerics.md); "
    "--zero-quantized-gradients-format rotated4 does"
)
INJECTED = "not supported: injected errors"
WEIGHT_DECAY = "not supported: a schedule of the weight decay"
NO_TABLE = "use --position-embedding-type none or rope"

_REFUSED = {
    EXPERTS: """--moe-* --use-grouped-gemm-for-shared-expert --overlap-moe-* --overlap-dispatch-*
        --ep-overlap-* --high-priority-a2a-* --mlp-type --topk --expert-interval --num-experts-switch
        --use-tutel --create-moe-param-group --enable-expert-tensor-parallelism --disable-moe-*""",
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
    OPTIMIZERS: "--sgd-* --lion-* --soap-* --adaptive-muon-* --use-bnb-optimizer",
    "not supported: reinforcement learning and instruction tuning": """--perform-rl-* --rl-* --grpo-*
        --langrl-* --refit-method --sft*""",
    "not supported: distillation": "--logits-save-* --logits-load-* --*-teacher --mos --kd --kd-*",
    "not supported: filling in the middle": "--fim-*",
    "use --keep-last and --async-save": "--non-persistent-*",
    "not supported: checkpoints in other formats": "--ckpt-convert-*",
    "restart with launch/local.sh --max-restarts or the SLURM script, which resume": "--inprocess-*",
    INJECTED: "--fault-injector-* --error-injection-type",
    "use --recompute-granularity full --recompute-offload": """--fine-grained-* --offload-modules
        --min-offloaded-tensor-size --delay-offload-* --delta-offload-* --activation-offload-fraction
        --cpu-offloading-*""",
    "not supported: norms after the residual connection": "--apply-residual-connection-post-layernorm",
    "not supported: Xavier initialisation": "--init-method-xavier-uniform",
    "not supported: a loss in fp16": "--fp16-lm-cross-entropy",
    "not supported: GPT-NeoX's files of settings; give flags, or --config": "--conf_dir --megatron_config",
    "not supported: autotuning; --dry-run compares settings": "--autotuning",
    "not supported: skipped iterations": """--skip-train-iteration-range --iterations-to-skip
        --phase-transition-iterations""",
    "not supported: objectives other than the next token": """--loss-on-targets-only --noise-density
        --mean-noise-span-length --reweight-loss-based-on-position-frequency""",
    "use megatron-zpp evaluate": "--eval-only --skip-train",
    "not supported: weighted ranges of data sets": "--*-weighted-split-paths*",
    "use megatron-zpp sample to generate text": "--ds-inference --inference",
    FEEDBACK: "--zero-gradient-error-feedback",
    "not supported: FP8 with e4m3 alone; use --fp8": "--fp8-e4m3",
    "not supported: retrieval (RETRO)": "--retro-*",
    "not supported: random layerwise token dropping": "--random-ltd",
    CURRICULUM: """--data-efficiency-curriculum-learning --return-data-index --train-idx-path
        --train-desc-path --train-*-idx-path""",
    "use --train-samples or --train-iters": "--train-data-exact-num-epochs",
    "name the data in --data-path": "--aml-data-download-path",
    "not supported: runs that only build data sets": "--use-dataset-only",
    "use --context-parallel-size": "--force-ds-sequence-parallel --ds-sequence-parallel-fpdt*",
    "not supported: embeddings in fp32": "--embedding-weights-in-fp32",
    "use --ckpt-step": "--load-tag --override-ckpt-iteration",
    "use --finetune, which loads weights only and starts at iteration 0": "--reset-iteration",
    "not supported: a schedule that restarts where iterations continue; --finetune restarts both": """
        --no-load-lr-state""",
    WEIGHT_DECAY: "--start-weight-decay --end-weight-decay",
    "not supported: batch sizes by tokens; use --rampup-batch-size START INCREMENT SAMPLES": """
        --step-batch-size-schedule""",
    "not supported: batches that are made smaller until they divide": "--decrease-batch-size-if-needed",
    "not supported: batches of its own for evaluation": "--eval-global-batch-size --eval-micro-batch-size",
    "use --valid-data-path with weights": "--multiple-validation-sets --validation-set-names",
    "not supported: a format of its own for logits": "--output-logit-dtype",
    "not supported: export to ONNX": "--onnx-safe",
    "use --load DIR --finetune": "--pretrained-checkpoint",
    "use --save-interval, --keep-last and --keep-every": "--persistent-save-interval",
    "not supported: initial weights that differ between ranks": "--data-parallel-random-init",
    "not supported: a deviation of its own for initial embeddings": "--embedding-init-method-std",
    "use --dry-run, which needs no ranks": "--fake-process-group",
    "use --attention-backend": """--flash-attention-version --use-kitchen-attention
        --kitchen-attention-backend""",
    "not supported: other recipes of FP8": """--fp8-quantizer-factory --no-fp8-wgrad --disable-fp8-wgrad
        --te-precision-config-file""",
    "it is for MXFP8; use --fp8-output-layer with --fp8-recipe delayed": "--fp8-output-proj",
    "not supported: FP8 in some layers only": """--first-last-layers-bf16 --num-layers-at-start-in-bf16
        --num-layers-at-end-in-bf16""",
    "not supported: settings of torch's products in bf16": "--disable-bf16-reduced-precision-matmul",
    "use --config FILE.yaml with this program's flags": "--yaml-cfg",
    "give --data-path, or data_path in --config": "--data-args-path --per-split-data-args-path",
    "not supported: counts of samples by data set": "--per-dataset-sequences-path",
    "use --reset-attention-mask --reset-position-ids": "--dataloader-inter-document-masking",
    "not supported: a surplus other than Megatron-LM's default": "--mid-level-dataset-surplus",
    "not supported: settings of tokenizers beside their files": """--tokenizer-metadata --chat-template
        --tokenizer-special-tokens --*tokenizer-sentencepiece-*""",
    "--vocab-size N makes N the end of document": "--null-tokenizer-eod-id",
    "not supported: weight decay of norms": "--apply-wd-to-qk-layernorm",
    "not supported: frozen weights": "--freeze-all-layers",
    "not supported: batch-invariant kernels": "--batch-invariant-*",
    "use --zero-stage 3 with --zero-hpz-partition-size": "--enable-full-sharding-in-hsdp",
    NO_TABLE: "--no-position-embedding",
    "give it without dashes in the file of --config, such as yarn_beta_fast: 32": """--longrope-short-factor
        --longrope-long-factor --yarn-beta-* --no-yarn-correction-range-round-to-int --mscale
        --mscale-all-dim""",
}
_IDLE = {
    "training generates no text; megatron-zpp sample has flags of its own": """--inference-*
        --decode-only-* --enable-chunked-prefill --num-speculative-tokens: --use-same-sampling-seed-*
        --mlp-chunks-for-prefill: --flash-decode --use-legacy-static-engine --max-tokens-to-oom:""",
    "only reports; the log, --metrics-file, TensorBoard and W&B have what is measured": """
        --log-*-to-tensorboard --no-log-*-to-tensorboard --disable-log-*-to-tensorboard --profile-*
        --profile_steps: --timing-* --codecarbon-* --record-memory-* --memory-snapshot-* --record-shapes
        --run-workload-inspector-server* --log-level: --log-level-replica: --log-path: --log-throughput
        --log-memory-interval: --log-device-memory-used --log-progress --log-energy --nvtx-ranges
        --log-max-attention-logit --no-barrier-with-level-1-timing --tensorboard-log-interval:
        --tensorboard-queue-size: --logging-level: --straggler-* --disable-straggler-on-startup
        --no-one-logger --one-logger-* --app-tag-run-* --otel-* --config-logger-dir: --use-pytorch-profiler
        --pytorch-profiler-* --wandb_group: --test-mode --dump-param-to-param-group-map: --rerun-mode:
        --check-for-spiky-loss --check-for-large-grads --result-rejected-tracker-filename:
        --gpu-sniff-test-interval:""",
    "ranks come from the launcher's environment": "--local_rank: --local-rank: --hostfile:",
    "tensor ranks always split hidden states between linear maps by tokens; one rank alone has all": """
        --sequence-parallel --partition-activations --distribute-checkpointed-activations
        --distribute-saved-activations""",
    "a signal, such as SIGTERM, saves and stops the run, and --exit-duration-in-mins does": """
        --kill-switch-file: --kill-switch-path: --exit-signal-handler* --adlr-autoresume*""",
    "gradients of what tensor ranks replicate are summed": "--sync-tp-duplicated-parameters",
    "--num-workers holds for all splits": "--valid-num-workers:",
    "there is no pipeline parallelism": """--no-pipeline-parallel --no-scatter-gather-tensors-in-pipeline
        --pp-partition-method: --num-layers-per-virtual-pipeline-stage: --enable-zbh1-* --use-tp-pp-dp-mapping
        --overlap-p2p-communication* --no-overlap-p2p-communication --standalone-embedding-stage
        --defer-embedding-wgrad-compute --use-ring-exchange-p2p --wgrad-deferral-limit:
        --account-for-*-in-pipeline-split --microbatch-group-size-per-virtual-pipeline-stage:
        --decoder-first-pipeline-num-layers: --decoder-last-pipeline-num-layers:
        --num-virtual-stages-per-pipeline-rank: --pipeline-model-parallel-layout:
        --pipeline-model-parallel-comm-backend: --pipeline-model-parallel-split-rank:""",
    "gradients accumulate and are summed in fp32, in flat buffers": """--zero-contigious-gradients
        --no-gradient-accumulation-fusion --accumulate-allreduce-grads-in-fp32
        --ddp-param-name-patterns-for-fp32-local-accumulation:""",
    "--fused-backend selects the norms and AdamW": """--cpu_torch_adam --ds_fused_adam
        --use-torch-optimizer-for-cpu-offload --disable-mem-efficient-ln""",
    "--attention-backend selects the attention kernel, and other fusions affect speed only": """
        --use-flash-attn --use-flash-attn-* --no-persist-layer-norm --no-masked-softmax-fusion
        --no-bias-dropout-fusion --attention-softmax-in-fp32 --transformer-impl: --no-rope-fusion
        --no-bias-swiglu-fusion""",
    "GELU is always the tanh approximation": "--no-bias-gelu-fusion --openai-gelu",
    "the result is the same": """--no-query-key-layer-scaling --apply-query-key-layer-scaling
        --use-grouped-gemm-for-dense-mlp --muon-use-syrk""",
    "there is only one model": "--use-mcore-models --use-legacy-models",
    "initial weights depend on --seed only": "--use-cpu-initialization --no-initialization",
    "order and dropout depend on --seed and consumed samples only": "--no-save-rng --no-load-rng",
    "files are read as needed, not mapped": """--mmap-warmup --no-mmap-bin-files
        --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load""",
    "data are read again for as long as the run lasts": "--repeated-dataloader",
    "the schedule always follows the flags": """--override-lr-scheduler --override-opt_param-scheduler
        --override-opt-param-scheduler""",
    "bounds of YaRN's range are rounded by default": "--yarn-correction-range-round-to-int",
    "--hidden-size / --mup-base-hidden-size says it": "--mup-width-mult:",
    "no part is experimental": "--enable-experimental",
    "scales are made for each tensor or once per step, by --fp8-recipe": """--fp8-interval:
        --reuse-grad-buf-for-mxfp8-param-ag""",
    "tensor ranks always exchange activations beside matmuls where their GPUs can": """
        --tp-comm-overlap-* --tp-comm-bootstrap-backend: --no-tp-comm-* --disable-tp-comm-*
        --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
        --symmetric-ar-type: --nccl-all-reduce-for-prefill --no-async-tensor-model-parallel-allreduce""",
    "the model has no experts": "--expert-tensor-parallel-size:",
    "context ranks exchange in one way, by --cp-comm-type": "--hierarchical-context-parallel-sizes:",
    "--seq-length / --context-parallel-size says it": "--max-seqlen-per-dp-cp-rank:",
    "ranks own different states, or compute the same bits": """
        --check-weight-hash-across-dp-replicas-interval:""",
    "the device decides the library": "--disable-gloo-process-groups",
    "affects speed or memory only, and --zero-… flags set how weights and gradients travel": """
        --manual-gc --manual-gc-interval: --no-manual-gc-eval --disable-manual-gc-eval
        --empty-unused-memory-level: --enable-cuda-graph --external-cuda-graph --te-rng-tracker
        --optimizer-cuda-graph --cuda-graph-* --disable-jit-fuser --use-te-activation-func
        --fused-residual-rmsnorm --use-transformer-engine-op-fuser --use-fused-weighted-squared-relu
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl: --delay-wgrad-compute
        --init-model-with-meta-device --keep-fp8-transpose-cache --train-sync-interval:
        --num-dataset-builder-threads: --synchronize-each-layer --abort-on-unmet-fused-kernel-constraints
        --no-create-attention-mask-in-dataloader --ddp-average-in-collective
        --overlap-param-gather-with-optimizer-step --ddp-pad-buckets-for-high-nccl-busbw
        --ddp-reduce-scatter-with-fp32-accumulation --no-align-param-gather --no-align-grad-reduce
        --disable-align-grad-reduce --no-use-layer-wise-param-layout --use-nccl-ub
        --disable-symmetric-registration --fsdp-manual-registration --create-all-gather-group
        --fsdp-double-buffer --no-gradient-reduce-div-fusion --fsdp-db-use-persist-buf-on-alloc-fail
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --torch-fsdp2-no-reshard-after-forward --use-sharp --lazy-mpu-init --ddp-num-buckets:
        --ddp-bucket-size: --suggested-communication-unit-size: --megatron-fsdp-version:
        --nccl-communicator-config-path: --sharp-enabled-group: --high-priority-stream-groups:
        --zero-reduce-bucket-size: --zero-allgather-bucket-size: --overlap-grad-reduce
        --overlap-param-gather --zero-reduce-scatter --memory-centric-tiled-linear --tile-factor:
        --scattered-embeddings""",
    "the ZeRO engine is built in, and --zero-stage selects sharding": """--deepspeed
        --use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp --DDP-impl:
        --use-megatron-fsdp""",
    "checkpoints have one sharded format with the tokenizer's files, and all bytes are checked": """
        --ckpt-format: --auto-detect-ckpt-format --use-dist-ckpt --verify-integrity
        --ckpt-fully-parallel-* --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure
        --use-persistent-ckpt-worker --async-ckpt-* --dist-ckpt-*
        --distrib-optim-fully-reshardable-mem-efficient --async-strategy:
        --ckpt-drop-redundant-extra-state --ckpt-pg-tensors-cache-*
        --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load --load-main-params-from-ckpt
        --universal-checkpoint --no-save-tokenizer-assets --disable-save-tokenizer-assets""",
    "the `tokenizers` library reads a tokenizer's files, without code, and adds no special tokens": """
        --trust-remote-code --tokenizer-hf-no-use-fast --use-gigatoken
        --tokenizer-hf-no-include-special-tokens""",
    "--recompute-granularity selects recomputation, layer by layer": """--contigious-checkpointing
        --deepspeed-activation-checkpointing --split-transformers""",
    "--zero-offload-optimizer offloads all states, pinned, and overlaps copies": """--use-pin-memory
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
        --optimizer-offload-fraction:""",
    "--distributed-timeout-minutes and --heartbeat-timeout find lost ranks, and name them": """
        --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters: --flight-recorder-*
        --distributed-timeout-seconds-after-init: --no-flight-recorder-* --disable-flight-recorder-*""",
    "steps with NaN or Inf are always skipped": "--no-check-for-nan-in-loss-and-grad",
    "there is no model parallelism": "--use-mp-args-from-checkpoint-args",
    "tokenizer flags beside --use-checkpoint-args win": """--no-use-tokenizer-model-from-checkpoint-args
        --disable-use-tokenizer-model-from-checkpoint-args""",
    "padding is never a token of the data": "--allow-ambiguous-pad-tokens",
    "there is no tokenizer of that kind": "--tiktoken-* --null-tokenizer-pad-id:",
    "objects are read with boto3": "--enable-msc --disable-msc",
    "only whole checkpoints are saved, and to --save alone": """--save-params-interval:
        --save-activations-interval: --save-wgrads-interval: --save-dgrads-interval:
        --save-tokens-per-expert-interval: --replication --replication-jump: --replication-factor:""",
    "evaluation begins at iteration 0": "--start-eval-at-iter:",
}


class Reason(NamedTuple):
    """Why a flag is refused, or has no effect."""

    text: str
    refused: bool
    takes_values: bool = True


def _by_name(reasons: dict[str, str], *, refused: bool) -> dict[str, Reason]:
    return {
        name.removesuffix(":"): Reason(text, refused, refused or name[-1] in ":*" or "*" in name)
        for text, names in reasons.items()
        for name in names.split()
    }


BY_NAME = _by_name(_REFUSED, refused=True) | _by_name(_IDLE, refused=False)
_PATTERNS = [name for name in BY_NAME if "*" in name]


def reason_of(name: str) -> Reason | None:
    """The reason of a flag; of several patterns the longest counts. None if nothing is known of the flag."""
    if name in BY_NAME:
        return BY_NAME[name]
    patterns = [pattern for pattern in _PATTERNS if fnmatchcase(name, pattern)]
    return BY_NAME[max(patterns, key=len)] if patterns else None
