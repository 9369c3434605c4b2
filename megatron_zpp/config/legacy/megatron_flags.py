"""Flags of today's Megatron-LM (core 0.16 and later) that are not flags here, and what happens to each.

old_flags.py has those that are older, and those of Megatron-DeepSpeed. megatron_features.py has the flags of
features that are not here.
"""

from megatron_zpp.config.legacy.old_flag import VALUE, OldFlag, idle, only, refused, renamed

_FP32 = "not supported: master weights, moments or sums of gradients below fp32"
_INJECTED = "not supported: injected errors"

RENAMED_TODAY = (
    OldFlag(
        name="--data-parallel-sharding-strategy",
        takes=str,
        means={
            "no_shard": {"zero.zero_stage": 0},
            "optim": {"zero.zero_stage": 1},
            "optim_grads": {"zero.zero_stage": 2},
            "optim_grads_params": {"zero.zero_stage": 3},
        },
        today="--zero-stage",
    ),
    OldFlag(name="--use-torch-fsdp2", gives={"zero.zero_stage": 3}, today="--zero-stage 3"),
    OldFlag(
        name="--save-retain-interval",
        takes=int,
        gives={"checkpoint.keep_last": 1, "checkpoint.keep_every": VALUE},
        today="--keep-last 1 --keep-every",
    ),
    OldFlag(
        name="--fp8-format",
        takes=str,
        means={"hybrid": {"precision.fp8": True}},
        today="--fp8",
    ),
    *(
        OldFlag(
            name=name,
            gives={"model.make_vocab_size_divisible_by": 1},
            today="--make-vocab-size-divisible-by 1",
        )
        for name in ("--no-pad-vocab-size", "--disable-pad-vocab-size")
    ),
    renamed("--encoder-num-layers", "model.num_layers", int),
    renamed("--mup-embedding-mult", "model.embedding_multiplier", float),
    renamed("--mup-output-mult", "model.logits_multiplier", float),
)

ONLY_TODAY = (
    only("--num-distributed-optimizer-instances", 1, "use --zero-stage and --zero-hpz-partition-size"),
    only("--outer-dp-sharding-strategy", "no_shard", "use --zero-stage"),
    only("--rope-type", "rope", "use --position-embedding-type yarn"),
    only("--recompute-modules", "core_attn", "use --recompute-granularity", many=True),
    only("--error-injection-rate", 0, _INJECTED),
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

_IDLE = {
    "always logged, and written to --metrics-file, TensorBoard and W&B": """--log-throughput
        --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-memory-interval:int
        --log-device-memory-used""",
    "--timing-log-level logs times, also to TensorBoard": "--log-timers-to-tensorboard",
    "bounds of YaRN's range are rounded by default": "--yarn-correction-range-round-to-int",
    "times are the minimum and the maximum over ranks": "--timing-log-option:str",
    "no part of a step waits for others to be timed": "--no-barrier-with-level-1-timing",
    "it is always written": "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
    "the first lines of the log say it": "--log-world-size-to-tensorboard",
    "the log and --metrics-file say it": "--log-progress",
    "sinks get every logged step": """--tensorboard-log-interval:int --tensorboard-queue-size:int
        --logging-level:int""",
    "--log-straggler logs all ranks": "--straggler-ctrlr-port:int --straggler-minmax-count:int",
    "only reports to NVIDIA's or other services": """--no-one-logger --one-logger-async --otel-enabled
        --one-logger-project:str --one-logger-run-name:str --app-tag-run-name:str --app-tag-run-version:str
        --otel-service-name:str --otel-span-groups:str --config-logger-dir:str""",
    "--profile always traces with torch's profiler": "--use-pytorch-profiler --record-shapes",
    "only adds to traces": """--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
        --pytorch-profiler-collect-chakra --nvtx-ranges""",
    "Python's garbage collector runs as usual": """--manual-gc --no-manual-gc-eval --disable-manual-gc-eval
        --manual-gc-interval:int""",
    "memory for model states is allocated once": "--empty-unused-memory-level:int",
    "layers are compiled by torch.compile, without CUDA graphs of their own": """--enable-cuda-graph
        --external-cuda-graph --te-rng-tracker --optimizer-cuda-graph --cuda-graph-impl:str
        --cuda-graph-scope:strs --cuda-graph-modules:strs --cuda-graph-warmup-steps:int""",
    "--compile selects compilation": """--disable-jit-fuser --use-te-activation-func --fused-residual-rmsnorm
        --use-transformer-engine-op-fuser --use-fused-weighted-squared-relu""",
    "output layer and loss are one operation, in chunks": """--cross-entropy-loss-fusion
        --cross-entropy-fusion-impl:str""",
    "the same seed and number of ranks give the same bits": "--deterministic-mode",
    "the layer's own gradients are kept or sent as they are made": "--delay-wgrad-compute",
    "--hidden-size / --mup-base-hidden-size says it": "--mup-width-mult:float",
    "parameters are made on the meta device, then sharded": "--init-model-with-meta-device",
    "no part is experimental": "--enable-experimental",
    "the results are the same": "--use-grouped-gemm-for-dense-mlp",
    "scales are made for each tensor or once per step, by --fp8-recipe": """--fp8-interval:int
        --reuse-grad-buf-for-mxfp8-param-ag""",
    "weights are transposed where they are used": "--keep-fp8-transpose-cache",
    "tensor ranks always exchange activations beside matmuls where their GPUs can": """
        --tp-comm-overlap-rs-dgrad --inference-fuse-tp-communication
        --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad
        --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag
        --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs
        --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs
        --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
        --tp-comm-overlap-cfg:str --tp-comm-bootstrap-backend:str --symmetric-ar-type:str
        --nccl-all-reduce-for-prefill""",
    "there is no pipeline parallelism": """--defer-embedding-wgrad-compute --use-ring-exchange-p2p
        --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --use-tp-pp-dp-mapping
        --wgrad-deferral-limit:int --microbatch-group-size-per-virtual-pipeline-stage:int
        --decoder-first-pipeline-num-layers:int --decoder-last-pipeline-num-layers:int
        --num-virtual-stages-per-pipeline-rank:int --pipeline-model-parallel-layout:str
        --pipeline-model-parallel-comm-backend:str""",
    "the model has no experts": "--expert-tensor-parallel-size:int",
    "context ranks exchange in one way, by --cp-comm-type": "--hierarchical-context-parallel-sizes:ints",
    "--seq-length / --context-parallel-size says it": "--max-seqlen-per-dp-cp-rank:int",
    "affects speed only, and --zero-… flags set how weights and gradients travel": """
        --ddp-average-in-collective --overlap-param-gather-with-optimizer-step
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation
        --no-align-param-gather --no-align-grad-reduce --disable-align-grad-reduce
        --no-use-layer-wise-param-layout --use-nccl-ub --disable-symmetric-registration
        --fsdp-manual-registration --create-all-gather-group --fsdp-double-buffer
        --no-gradient-reduce-div-fusion --fsdp-db-use-persist-buf-on-alloc-fail
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --torch-fsdp2-no-reshard-after-forward --use-sharp --lazy-mpu-init --ddp-num-buckets:int
        --ddp-bucket-size:int --suggested-communication-unit-size:int --megatron-fsdp-version:int
        --nccl-communicator-config-path:str --sharp-enabled-group:str --high-priority-stream-groups:strs""",
    "--zero-stage selects sharding": "--use-megatron-fsdp",
    "the host only runs one step ahead": "--train-sync-interval:int",
    "ranks own different states, or compute the same bits": """
        --check-weight-hash-across-dp-replicas-interval:int""",
    "--distributed-backend selects the library": "--disable-gloo-process-groups",
    "--zero-offload-optimizer overlaps copies": "--overlap-cpu-optimizer-d2h-h2d",
    "--zero-offload-optimizer pins memory": "--no-pin-cpu-grads --no-pin-cpu-params",
    "--fused-backend selects AdamW": "--use-torch-optimizer-for-cpu-offload",
    "--distributed-timeout-minutes and --heartbeat-timeout find lost ranks": "--enable-ft-package",
    "--heartbeat-timeout is given": "--calc-ft-timeouts --ft-num-warmup-iters:int",
    "the first time-out stays": "--distributed-timeout-seconds-after-init:int",
    "a lost rank is named without it": """--flight-recorder-dump-path:str
        --flight-recorder-trace-buffer-size:int --no-flight-recorder-dump-on-timeout
        --disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec""",
    "the first signal always saves and stops": """--exit-signal-handler-for-dataloader
        --exit-signal-handler-for-training""",
    "steps with NaN or Inf are always skipped": "--no-check-for-nan-in-loss-and-grad",
    "checkpoints have one format, are sharded, and all of their bytes are checked": """
        --auto-detect-ckpt-format --use-dist-ckpt --ckpt-fully-parallel-save --verify-integrity
        --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
        --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-save-pre-mcore-014
        --ckpt-fully-parallel-load-per-rank-objects --ckpt-drop-redundant-extra-state
        --no-ckpt-load-validate-sharding-integrity --ckpt-pg-tensors-cache-create
        --disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load
        --disable-strict-fsdp-dtensor-load --dist-ckpt-strictness:str --dist-ckpt-format:str
        --async-strategy:str --ckpt-fully-parallel-load-exchange-algo:str --ckpt-pg-tensors-cache-path:str
        --ckpt-fully-parallel-save-process-group:str --ckpt-fully-parallel-load-process-group:str
        --dist-ckpt-workers:int --async-ckpt-cpu-priority:int --async-ckpt-io-priority:int""",
    "a checkpoint always has the tokenizer's files": """--no-save-tokenizer-assets
        --disable-save-tokenizer-assets""",
    "there is no model parallelism": "--use-mp-args-from-checkpoint-args",
    "tokenizer flags beside --use-checkpoint-args win": """--no-use-tokenizer-model-from-checkpoint-args
        --disable-use-tokenizer-model-from-checkpoint-args""",
    "the schedule always follows the flags": "--override-opt-param-scheduler",
    "files are read as needed, not mapped": "--no-mmap-bin-files --dataloader-defer-npy-index-mmap",
    "no index is read at the start": "--dataloader-fast-cache-load",
    "attention needs no mask in memory": "--no-create-attention-mask-in-dataloader",
    "opening data sets takes no threads": "--num-dataset-builder-threads:int",
    "padding is never a token of the data": "--allow-ambiguous-pad-tokens",
    "there is no tokenizer of that kind": """--tiktoken-pattern:str --tiktoken-num-special-tokens:int
        --null-tokenizer-pad-id:int""",
    "no code that comes with a tokenizer is run": "--trust-remote-code",
    "the `tokenizers` library reads them": "--tokenizer-hf-no-use-fast --use-gigatoken",
    "special tokens around a text are never added": "--tokenizer-hf-no-include-special-tokens",
    "objects are read with boto3": "--enable-msc --disable-msc",
    "only reports or compares": """--record-memory-history --memory-snapshot-path:str --log-energy
        --log-max-attention-logit --test-mode --dump-param-to-param-group-map:str --rerun-mode:str
        --check-for-spiky-loss --check-for-large-grads --result-rejected-tracker-filename:str
        --gpu-sniff-test-interval:int""",
    "--log-straggler is on from the start": "--disable-straggler-on-startup",
    "signals, and --exit-duration-in-mins, end a run in time": """--adlr-autoresume
        --adlr-autoresume-interval:int""",
    "only whole checkpoints are saved": """--save-params-interval:int --save-activations-interval:int
        --save-wgrads-interval:int --save-dgrads-interval:int --save-tokens-per-expert-interval:int""",
    "checkpoints go to --save alone": "--replication --replication-jump:int --replication-factor:int",
    "weights are always the fp32 master weights": "--load-main-params-from-ckpt",
    "parameters are always initialised": "--no-initialization",
    "evaluation begins at iteration 0": "--start-eval-at-iter:int",
    "--zero-offload-optimizer offloads all states": "--optimizer-offload-fraction:float",
    "another way to the same matmuls": "--muon-use-syrk",
    "gradients are summed in fp32": "--ddp-param-name-patterns-for-fp32-local-accumulation:strs",
    "training generates no text; megatron-zpp sample has flags of its own": """--flash-decode
        --inference-rng-tracker --use-legacy-static-engine --max-tokens-to-oom:int
        --inference-max-requests:int --inference-max-seq-length:int""",
}
_REFUSED = {
    "not supported: batch sizes by tokens; use --rampup-batch-size START INCREMENT SAMPLES": """
        --step-batch-size-schedule""",
    "not supported: batches that are made smaller until they divide": "--decrease-batch-size-if-needed",
    "not supported: skipped iterations": "--iterations-to-skip --phase-transition-iterations",
    "not supported: batches of its own for evaluation": """--eval-global-batch-size
        --eval-micro-batch-size""",
    "use megatron-zpp evaluate": "--skip-train",
    "use --valid-data-path with weights": "--multiple-validation-sets --validation-set-names",
    "not supported: a format of its own for logits": "--output-logit-dtype",
    "not supported: export to ONNX": "--onnx-safe",
    "use --load DIR --finetune": "--pretrained-checkpoint",
    "use --ckpt-step": "--override-ckpt-iteration",
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
    _INJECTED: "--error-injection-type",
    "use --config FILE.yaml with this program's flags": "--yaml-cfg",
    "give --data-path, or data_path in --config": "--data-args-path --per-split-data-args-path",
    "not supported: counts of samples by data set": "--per-dataset-sequences-path",
    "use --reset-attention-mask --reset-position-ids": "--dataloader-inter-document-masking",
    "not supported: a surplus other than Megatron-LM's default": "--mid-level-dataset-surplus",
    "not supported: settings of tokenizers beside their files": """--tokenizer-metadata --chat-template
        --tokenizer-special-tokens --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces""",
    "--vocab-size N makes N the end of document": "--null-tokenizer-eod-id",
    "not supported: weight decay of norms": "--apply-wd-to-qk-layernorm",
    "not supported: frozen weights": "--freeze-all-layers",
    "use --recompute-granularity full --recompute-offload": """--cpu-offloading-num-layers
        --cpu-offloading-retain-pinned-cpu-buffers""",
    "not supported: batch-invariant kernels": "--batch-invariant-mode --batch-invariant-backend",
    "use --zero-stage 3 with --zero-hpz-partition-size": "--enable-full-sharding-in-hsdp",
    "restart with launch/local.sh --max-restarts or the SLURM script, which resume": "--inprocess-restart",
}
IDLE_TODAY = (
    *idle(_IDLE),
    OldFlag(
        name="--no-position-embedding",
        needs={"model.position_embedding_type": "rope"},
        why="with --position-embedding-type rope there is no table of positions",
        otherwise="use --position-embedding-type none or rope",
    ),
)
REFUSED_TODAY = refused(_REFUSED)
