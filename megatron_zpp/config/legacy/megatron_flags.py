"""Flags of today's Megatron-LM (core 0.16 and later) that are not flags here, and what happens to each.

old_flags.py has those that are older, and those of Megatron-DeepSpeed. megatron_features.py has the flags of
features that are not here.
"""

from megatron_zpp.config.legacy.old_flag import VALUE, OldFlag, idle, only, refused, renamed

_EXCHANGES = "--tp-comm-overlap alone sets how tensor ranks exchange activations"
_NO_PP = "there is no pipeline parallelism"
_NO_CP = "there is no context parallelism"
_GRAPHS = "layers are compiled by torch.compile, without CUDA graphs of their own"
_SPEED = "affects speed only, and --zero-… flags set how weights and gradients travel"
_FORMAT = "checkpoints have one format, are sharded, and all of their bytes are checked"
_ALWAYS = "always logged, and written to --metrics-file, TensorBoard and W&B"
_SERVED = "training generates no text; megatron_zpp.commands.sample has flags of its own"
_NO_TEXT = "there is no tokenizer of that kind"
_FP32 = "master weights, moments and sums of gradients are fp32; omit it"
_SCALE = "scales are made for each tensor or once per step, by --fp8-recipe"
_CONFIG = "use --config FILE.yaml with this program's flags"

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
    OldFlag(
        name="--no-pad-vocab-size",
        gives={"model.make_vocab_size_divisible_by": 1},
        today="--make-vocab-size-divisible-by 1",
    ),
    OldFlag(
        name="--disable-pad-vocab-size",
        gives={"model.make_vocab_size_divisible_by": 1},
        today="--make-vocab-size-divisible-by 1",
    ),
    renamed("--encoder-num-layers", "--num-layers", "model.num_layers", int),
)

ONLY_TODAY = (
    only("--num-distributed-optimizer-instances", 1, "use --zero-stage and --zero-hpz-partition-size"),
    only("--outer-dp-sharding-strategy", "no_shard", "use --zero-stage"),
    only("--rope-type", "rope", "use --position-embedding-type rope, and --use-rope-scaling"),
    only("--softmax-type", "vanilla", "attention's softmax is the usual one; omit it"),
    only("--recompute-modules", "core_attn", "use --recompute-granularity", many=True),
    only("--rerun-mode", "disabled", "no step is computed twice to compare; omit it"),
    only("--error-injection-rate", 0, "no errors are injected; omit it"),
    only("--vocab-extra-ids", 0, "the vocabulary is the tokenizer's; omit it"),
    only("--glu-linear-offset", 0.0, "SwiGLU has no offset; omit it"),
    only("--optimizer-offload-fraction", 1.0, "--zero-offload-optimizer offloads all states; omit it"),
    only("--main-grads-dtype", "fp32", _FP32),
    only("--main-params-dtype", "fp32", _FP32),
    only("--exp-avg-dtype", "fp32", _FP32),
    only("--exp-avg-sq-dtype", "fp32", _FP32),
    only("--megatron-fsdp-main-params-dtype", ("fp32", "auto"), _FP32),
    only("--megatron-fsdp-main-grads-dtype", ("fp32", "auto"), _FP32),
    only("--megatron-fsdp-grad-comm-dtype", "auto", "use --grad-reduce-in-bf16, or omit it"),
    only("--exit-signal", ("SIGTERM", "SIGUSR1", "SIGINT"), "these save and stop; omit it"),
    only("--no-weight-decay-cond-type", "default", "biases and norms are not decayed; omit it"),
)

IDLE_TODAY = (
    OldFlag(
        name="--no-position-embedding",
        needs={"model.position_embedding_type": "rope"},
        why="with --position-embedding-type rope there is no table of positions",
        otherwise="use --position-embedding-type none or rope",
    ),
    # Logs
    *idle(_ALWAYS, "--log-throughput --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard"),
    *idle(_ALWAYS, "--log-memory-interval", takes=int),
    *idle(_ALWAYS, "--log-device-memory-used"),
    *idle("--timing-log-level logs times, also to TensorBoard", "--log-timers-to-tensorboard"),
    *idle("times are the minimum and the maximum over ranks", "--timing-log-option", takes=str),
    *idle("no part of a step waits for others to be timed", "--no-barrier-with-level-1-timing"),
    *idle(
        "it is always written",
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
    ),
    *idle("the first lines of the log say it", "--log-world-size-to-tensorboard"),
    *idle("the log and --metrics-file say it", "--log-progress"),
    *idle(
        "sinks get every logged step",
        "--tensorboard-log-interval --tensorboard-queue-size --logging-level",
        takes=int,
    ),
    *idle("--log-straggler logs all ranks", "--straggler-ctrlr-port --straggler-minmax-count", takes=int),
    *idle(
        "only reports to NVIDIA's or other services",
        "--no-one-logger --one-logger-async --otel-enabled",
    ),
    *idle(
        "only reports to NVIDIA's or other services",
        "--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version "
        "--otel-service-name --otel-span-groups --config-logger-dir",
        takes=str,
    ),
    *idle("--profile always traces with torch's profiler", "--use-pytorch-profiler --record-shapes"),
    *idle("only adds to traces", "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"),
    *idle("only adds to traces", "--pytorch-profiler-collect-chakra --nvtx-ranges"),
    # Memory, kernels, graphs
    *idle(
        "Python's garbage collector runs as usual", "--manual-gc --no-manual-gc-eval --disable-manual-gc-eval"
    ),
    *idle("Python's garbage collector runs as usual", "--manual-gc-interval", takes=int),
    *idle("memory for model states is allocated once", "--empty-unused-memory-level", takes=int),
    *idle(_GRAPHS, "--enable-cuda-graph --external-cuda-graph --te-rng-tracker --optimizer-cuda-graph"),
    *idle(_GRAPHS, "--cuda-graph-impl", takes=str),
    *idle(_GRAPHS, "--cuda-graph-scope --cuda-graph-modules", takes=str, many=True),
    *idle(_GRAPHS, "--cuda-graph-warmup-steps", takes=int),
    *idle("--compile selects compilation", "--disable-jit-fuser --use-te-activation-func"),
    *idle("--compile selects compilation", "--fused-residual-rmsnorm --use-transformer-engine-op-fuser"),
    *idle("--compile selects compilation", "--use-fused-weighted-squared-relu"),
    *idle("output layer and loss are one operation, in chunks", "--cross-entropy-loss-fusion"),
    *idle("output layer and loss are one operation, in chunks", "--cross-entropy-fusion-impl", takes=str),
    *idle("the same seed and number of ranks give the same bits", "--deterministic-mode"),
    *idle("norm weights begin at 1 and are not decayed, which trains the same", "--apply-layernorm-1p"),
    *idle("the layer's own gradients are kept or sent as they are made", "--delay-wgrad-compute"),
    *idle("parameters are made on the meta device, then sharded", "--init-model-with-meta-device"),
    *idle("no part is experimental", "--enable-experimental"),
    *idle("the results are the same", "--use-grouped-gemm-for-dense-mlp"),
    *idle(_SCALE, "--fp8-interval", takes=int),
    *idle("weights are transposed where they are used", "--keep-fp8-transpose-cache"),
    *idle(_SCALE, "--reuse-grad-buf-for-mxfp8-param-ag"),
    # Parallelism that is not used
    *idle(_EXCHANGES, "--tp-comm-overlap-rs-dgrad --inference-fuse-tp-communication"),
    *idle(_EXCHANGES, "--no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad"),
    *idle(_EXCHANGES, "--disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag"),
    *idle(_EXCHANGES, "--no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs --no-tp-comm-split-ag"),
    *idle(_EXCHANGES, "--disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs"),
    *idle(_EXCHANGES, "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding"),
    *idle(_EXCHANGES, "--tp-comm-overlap-cfg --tp-comm-bootstrap-backend --symmetric-ar-type", takes=str),
    *idle(_EXCHANGES, "--nccl-all-reduce-for-prefill"),
    *idle(_NO_PP, "--defer-embedding-wgrad-compute --use-ring-exchange-p2p --no-overlap-p2p-communication"),
    *idle(_NO_PP, "--overlap-p2p-communication-warmup-flush --account-for-embedding-in-pipeline-split"),
    *idle(_NO_PP, "--account-for-loss-in-pipeline-split --use-tp-pp-dp-mapping"),
    *idle(_NO_PP, "--wgrad-deferral-limit --microbatch-group-size-per-virtual-pipeline-stage", takes=int),
    *idle(_NO_PP, "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers", takes=int),
    *idle(_NO_PP, "--num-virtual-stages-per-pipeline-rank", takes=int),
    *idle(_NO_PP, "--pipeline-model-parallel-layout --pipeline-model-parallel-comm-backend", takes=str),
    *idle("the model has no experts", "--expert-tensor-parallel-size", takes=int),
    *idle(_NO_CP, "--cp-comm-type", takes=str, many=True),
    *idle(_NO_CP, "--hierarchical-context-parallel-sizes", takes=int, many=True),
    *idle(_NO_CP, "--max-seqlen-per-dp-cp-rank", takes=int),
    # How states are sharded and sent
    *idle(_SPEED, "--ddp-average-in-collective --overlap-param-gather-with-optimizer-step"),
    *idle(_SPEED, "--ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation"),
    *idle(_SPEED, "--no-align-param-gather --no-align-grad-reduce --disable-align-grad-reduce"),
    *idle(_SPEED, "--no-use-layer-wise-param-layout --use-nccl-ub --disable-symmetric-registration"),
    *idle(_SPEED, "--fsdp-manual-registration --create-all-gather-group --fsdp-double-buffer"),
    *idle(_SPEED, "--no-gradient-reduce-div-fusion --fsdp-db-use-persist-buf-on-alloc-fail"),
    *idle(_SPEED, "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer"),
    *idle(_SPEED, "--torch-fsdp2-no-reshard-after-forward --use-sharp --lazy-mpu-init"),
    *idle(_SPEED, "--ddp-num-buckets --ddp-bucket-size --suggested-communication-unit-size", takes=int),
    *idle(_SPEED, "--megatron-fsdp-version", takes=int),
    *idle(_SPEED, "--nccl-communicator-config-path --sharp-enabled-group", takes=str),
    *idle(_SPEED, "--high-priority-stream-groups", takes=str, many=True),
    *idle("--zero-stage selects sharding", "--use-megatron-fsdp"),
    *idle("states are fp32", "--use-precision-aware-optimizer"),
    *idle("the host only runs one step ahead", "--train-sync-interval", takes=int),
    *idle(
        "ranks own different states, or compute the same bits",
        "--check-weight-hash-across-dp-replicas-interval",
        takes=int,
    ),
    *idle("--distributed-backend selects the library", "--disable-gloo-process-groups"),
    *idle("--zero-offload-optimizer overlaps copies", "--overlap-cpu-optimizer-d2h-h2d"),
    *idle("--zero-offload-optimizer pins memory", "--no-pin-cpu-grads --no-pin-cpu-params"),
    *idle("--fused-backend selects AdamW", "--use-torch-optimizer-for-cpu-offload"),
    *idle("--distributed-timeout-minutes and --heartbeat-timeout find lost ranks", "--enable-ft-package"),
    *idle("--heartbeat-timeout is given", "--calc-ft-timeouts"),
    *idle("--heartbeat-timeout is given", "--ft-num-warmup-iters", takes=int),
    *idle("the first time-out stays", "--distributed-timeout-seconds-after-init", takes=int),
    *idle("a lost rank is named without it", "--flight-recorder-dump-path", takes=str),
    *idle("a lost rank is named without it", "--flight-recorder-trace-buffer-size", takes=int),
    *idle(
        "a lost rank is named without it",
        "--no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout "
        "--flight-recorder-include-stack-trace --no-flight-recorder-include-only-active "
        "--disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec "
        "--disable-flight-recorder-extra-dump-on-exec",
    ),
    *idle("the first signal always saves and stops", "--exit-signal-handler-for-dataloader"),
    *idle("the first signal always saves and stops", "--exit-signal-handler-for-training"),
    *idle("steps with NaN or Inf are always skipped", "--no-check-for-nan-in-loss-and-grad"),
    # Checkpoints
    *idle(_FORMAT, "--auto-detect-ckpt-format --use-dist-ckpt --ckpt-fully-parallel-save --verify-integrity"),
    *idle(
        _FORMAT, "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure"
    ),
    *idle(
        _FORMAT, "--use-persistent-ckpt-worker --async-ckpt-use-cpu-shm --dist-ckpt-optim-fully-reshardable"
    ),
    *idle(_FORMAT, "--distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-save-pre-mcore-014"),
    *idle(_FORMAT, "--ckpt-fully-parallel-load-per-rank-objects --ckpt-drop-redundant-extra-state"),
    *idle(_FORMAT, "--no-ckpt-load-validate-sharding-integrity --ckpt-pg-tensors-cache-create"),
    *idle(_FORMAT, "--disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load"),
    *idle(_FORMAT, "--disable-strict-fsdp-dtensor-load"),
    *idle(_FORMAT, "--dist-ckpt-strictness --dist-ckpt-format --async-strategy", takes=str),
    *idle(_FORMAT, "--ckpt-fully-parallel-load-exchange-algo --ckpt-pg-tensors-cache-path", takes=str),
    *idle(_FORMAT, "--ckpt-fully-parallel-save-process-group", takes=str),
    *idle(_FORMAT, "--ckpt-fully-parallel-load-process-group", takes=str),
    *idle(_FORMAT, "--dist-ckpt-workers --async-ckpt-cpu-priority --async-ckpt-io-priority", takes=int),
    *idle("a checkpoint always has the tokenizer's files", "--no-save-tokenizer-assets"),
    *idle("a checkpoint always has the tokenizer's files", "--disable-save-tokenizer-assets"),
    *idle("there is no model parallelism", "--use-mp-args-from-checkpoint-args"),
    *idle(
        "tokenizer flags beside --use-checkpoint-args win", "--no-use-tokenizer-model-from-checkpoint-args"
    ),
    *idle(
        "tokenizer flags beside --use-checkpoint-args win",
        "--disable-use-tokenizer-model-from-checkpoint-args",
    ),
    *idle("the schedule always follows the flags", "--override-opt-param-scheduler"),
    # Data and tokenizers
    *idle("files are read as needed, not mapped", "--no-mmap-bin-files --dataloader-defer-npy-index-mmap"),
    *idle("no index is read at the start", "--dataloader-fast-cache-load"),
    *idle("attention needs no mask in memory", "--no-create-attention-mask-in-dataloader"),
    *idle("opening data sets takes no threads", "--num-dataset-builder-threads", takes=int),
    *idle("padding is never a token of the data", "--allow-ambiguous-pad-tokens"),
    *idle(_NO_TEXT, "--tiktoken-pattern", takes=str),
    *idle(_NO_TEXT, "--tiktoken-num-special-tokens --null-tokenizer-pad-id", takes=int),
    *idle("no code that comes with a tokenizer is run", "--trust-remote-code"),
    *idle("the `tokenizers` library reads them", "--tokenizer-hf-no-use-fast --use-gigatoken"),
    *idle("special tokens around a text are never added", "--tokenizer-hf-no-include-special-tokens"),
    *idle("objects are read with boto3", "--enable-msc --disable-msc"),
    # Text generation, which Megatron-LM's training does not do either
    *idle(_SERVED, "--flash-decode --inference-rng-tracker --use-legacy-static-engine"),
    *idle(_SERVED, "--max-tokens-to-oom --inference-max-requests --inference-max-seq-length", takes=int),
)

REFUSED_TODAY = (
    *refused("use --rampup-batch-size START INCREMENT SAMPLES", "--step-batch-size-schedule"),
    *refused("sizes must divide; give other ones", "--decrease-batch-size-if-needed"),
    *refused("no iteration is skipped; omit it", "--iterations-to-skip"),
    *refused("there is no such test; omit it", "--gpu-sniff-test-interval"),
    *refused("evaluation has the batch size of training; omit it", "--eval-global-batch-size"),
    *refused("evaluation has the batch size of training; omit it", "--eval-micro-batch-size"),
    *refused("evaluation begins at iteration 0; use --eval-interval", "--start-eval-at-iter"),
    *refused("use python -m megatron_zpp.commands.evaluate", "--skip-train"),
    *refused("use --valid-data-path with weights", "--multiple-validation-sets --validation-set-names"),
    *refused("omit it", "--test-mode"),
    *refused("use --load DIR --finetune", "--pretrained-checkpoint"),
    *refused("use --ckpt-step", "--override-ckpt-iteration"),
    *refused("use --save-interval, --keep-last and --keep-every", "--persistent-save-interval"),
    *refused("only whole checkpoints are saved; use --save-interval", "--save-params-interval"),
    *refused("only whole checkpoints are saved; use --save-interval", "--save-activations-interval"),
    *refused("only whole checkpoints are saved; use --save-interval", "--save-wgrads-interval"),
    *refused("only whole checkpoints are saved; use --save-interval", "--save-dgrads-interval"),
    *refused("the model is dense; omit it", "--save-tokens-per-expert-interval"),
    *refused("weights are always the fp32 master weights; omit it", "--load-main-params-from-ckpt"),
    *refused("use --async-save", "--replication --replication-jump --replication-factor"),
    *refused("initial weights are the same on all ranks; omit it", "--data-parallel-random-init"),
    *refused("parameters are always initialised; omit it", "--no-initialization"),
    *refused("use --init-method-std for all weights", "--embedding-init-method-std"),
    *refused("use --dry-run, which needs no ranks", "--fake-process-group"),
    *refused("use --attention-backend", "--flash-attention-version --use-kitchen-attention"),
    *refused("use --attention-backend", "--kitchen-attention-backend"),
    *refused("--fp8 has one form; omit it", "--fp8-quantizer-factory --no-fp8-wgrad --disable-fp8-wgrad"),
    *refused("--fp8 has one form; omit it", "--te-precision-config-file"),
    *refused("it is for MXFP8; use --fp8-output-layer with --fp8-recipe delayed", "--fp8-output-proj"),
    *refused("--fp8 applies to all layers; omit it", "--first-last-layers-bf16"),
    *refused("--fp8 applies to all layers; omit it", "--num-layers-at-start-in-bf16"),
    *refused("--fp8 applies to all layers; omit it", "--num-layers-at-end-in-bf16"),
    *refused("torch's own setting holds; omit it", "--disable-bf16-reduced-precision-matmul"),
    *refused("only steps with NaN or Inf are skipped; omit it", "--check-for-spiky-loss"),
    *refused("only steps with NaN or Inf are skipped; omit it", "--check-for-large-grads"),
    *refused("no errors are injected; omit it", "--error-injection-type --result-rejected-tracker-filename"),
    *refused("memory is logged; omit it", "--record-memory-history --memory-snapshot-path --log-energy"),
    *refused("attention does not return logits; omit it", "--log-max-attention-logit"),
    *refused("--log-straggler is on from the start; omit it", "--disable-straggler-on-startup"),
    *refused("signals, and --exit-duration-in-mins, end a run in time", "--adlr-autoresume"),
    *refused("signals, and --exit-duration-in-mins, end a run in time", "--adlr-autoresume-interval"),
    *refused(_CONFIG, "--yaml-cfg --phase-transition-iterations"),
    *refused("give --data-path, or data_path in --config", "--data-args-path --per-split-data-args-path"),
    *refused("samples are cut from documents; omit it", "--per-dataset-sequences-path"),
    *refused("use --reset-attention-mask --reset-position-ids", "--dataloader-inter-document-masking"),
    *refused("--dataset-order megatron has Megatron-LM's default; omit it", "--mid-level-dataset-surplus"),
    *refused("tokenizers are used as their files say; omit it", "--tokenizer-metadata --chat-template"),
    *refused("tokenizers are used as their files say; omit it", "--tokenizer-special-tokens"),
    *refused("tokenizers are used as their files say; omit it", "--tokenizer-sentencepiece-legacy"),
    *refused(
        "tokenizers are used as their files say; omit it",
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    ),
    *refused("--vocab-size N makes N the end of document; omit it", "--null-tokenizer-eod-id"),
    *refused("norms are not decayed; omit it", "--apply-wd-to-qk-layernorm"),
    *refused("all weights are trained; omit it", "--freeze-all-layers"),
    *refused("omit it", "--dump-param-to-param-group-map --output-logit-dtype --onnx-safe"),
    *refused("use --recompute-granularity full --recompute-offload", "--cpu-offloading-num-layers"),
    *refused(
        "use --recompute-granularity full --recompute-offload", "--cpu-offloading-retain-pinned-cpu-buffers"
    ),
    *refused("batches are computed as they are; omit it", "--batch-invariant-mode --batch-invariant-backend"),
    *refused("use --zero-stage 3 with --zero-hpz-partition-size", "--enable-full-sharding-in-hsdp"),
    *refused(
        "gradients are summed in fp32; omit it", "--ddp-param-name-patterns-for-fp32-local-accumulation"
    ),
    *refused(
        "restart with launch/local.sh --max-restarts or the SLURM script, which resume", "--inprocess-restart"
    ),
)
