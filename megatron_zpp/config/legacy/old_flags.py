"""Flags of Megatron-LM, Megatron-DeepSpeed and this program's past, and what happens to each.

Names and meanings are those of Megatron-LM from its first release to core 0.12, of Megatron-DeepSpeed and its
fork by BigScience, and of GPT-NeoX's launcher. None of them is a current flag.
"""

from megatron_zpp.config.legacy.megatron_features import (
    CURRICULUM,
    DISTILLATION,
    EXPERTS,
    OPTIMIZERS,
)
from megatron_zpp.config.legacy.megatron_flags import IDLE_TODAY, ONLY_TODAY, REFUSED_TODAY, RENAMED_TODAY
from megatron_zpp.config.legacy.old_flag import VALUE, OldFlag, idle, only, refused, renamed, retired

_FULL = {"recompute.recompute_granularity": "full"}
_LONG = "use --context-parallel-size"
_FEEDBACK = (
    "not supported: error feedback, which did not lower the loss (docs/internals/numerics.md); "
    "--zero-quantized-gradients-format rotated4 does"
)
_WEIGHT_DECAY = "not supported: a schedule of the weight decay"
_NO_SNAPSHOTS = "states are copied to --save alone"

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
    OldFlag(
        name="--checkpoint-activations",
        gives=_FULL | {"recompute.recompute_method": "uniform"},
        today="--recompute-granularity full --recompute-method uniform",
    ),
    OldFlag(
        name="--activations-checkpoint-method",
        takes=str,
        gives=_FULL | {"recompute.recompute_method": VALUE},
        today="--recompute-granularity full --recompute-method",
    ),
    renamed("--checkpoint-num-layers", "recompute.recompute_num_layers", int),
    renamed("--activations-checkpoint-num-layers", "recompute.recompute_num_layers", int),
    renamed("--checkpoint-granularity", "recompute.recompute_granularity", str),
    renamed("--checkpoint-method", "recompute.recompute_method", str),
    renamed("--checkpoint-in-cpu", "recompute.recompute_offload"),
    renamed("--cpu-optimizer", "zero.zero_offload_optimizer"),
    renamed("--optimizer-cpu-offload", "zero.zero_offload_optimizer"),
    renamed("--rotary-position-embeddings-theta", "model.rotary_base", float),
    OldFlag(
        name="--num-key-value-heads",
        takes=int,
        gives={"model.group_query_attention": True, "model.num_query_groups": VALUE},
        today="--group-query-attention --num-query-groups",
    ),
    renamed("--fp8-hybrid", "precision.fp8"),
    renamed("--ds-sequence-parallel-size", "distributed.context_parallel_size", int),
    renamed("--wandb_run_name", "logging.wandb_exp_name", str),
    renamed("--wandb_team", "logging.wandb_entity", str),
    renamed("--pad-vocab-size-to", "model.padded_vocab_size", int),
    renamed("--tokenizer-name-or-path", "tokenizer.tokenizer_model", str),
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
    only("--expert-model-parallel-size", 1, EXPERTS),
    only("--moe-expert-parallel-size", 1, EXPERTS),
    only("--num-experts", 1, EXPERTS, many=True),
    only("--muon-scalar-optimizer", "adam", OPTIMIZERS),
    only("--muon-tp-mode", ("duplicated", "distributed"), "whole matrices are made orthogonal"),
    only("--muon-fp32-matmul-prec", "medium", "Newton-Schulz runs in bf16, or in fp32 with --fp32"),
    only("--dataloader-type", "single", "not supported: cyclic and external data loaders"),
    only("--data-impl", ("mmap", "infer"), "only .bin with .idx can be read; preprocess the data again"),
    only("--remote-device", "none", "not supported: parameters in CPU memory or on disks"),
    only("--weight-decay-incr-style", "constant", _WEIGHT_DECAY),
)

_IDLE = {
    "the ZeRO engine is built in": """--deepspeed --use-contiguous-buffers-in-ddp
        --no-contiguous-buffers-in-local-ddp --DDP-impl:str""",
    "ranks come from the launcher's environment": """--local_rank:int --local-rank:int
        --hostfile:str""",
    "--recompute-granularity selects recomputation": "--deepspeed-activation-checkpointing",
    "--recompute-granularity selects recomputation, layer by layer": "--split-transformers",
    "stored inputs of recomputation stay where they were computed": "--contigious-checkpointing",
    "no layer waits for the device": "--synchronize-each-layer",
    "only prints; use benchmarks/zero_speed.py --trace": "--profile-backward",
    "tensor ranks always split hidden states between linear maps by tokens; one rank alone has all": """
        --sequence-parallel --partition-activations --distribute-checkpointed-activations
        --distribute-saved-activations""",
    "activations are gathered and scattered, not all-reduced": "--no-async-tensor-model-parallel-allreduce",
    "linear layers are whole, with the same result": "--memory-centric-tiled-linear --tile-factor:int",
    "embeddings are whole, with the same result": "--scattered-embeddings",
    "every checkpoint loads at any number of ranks": "--universal-checkpoint",
    "a signal, such as SIGTERM, saves and stops the run": "--kill-switch-file:str --kill-switch-path:str",
    "--profile with --profile-step-start and --profile-step-end traces": "--profile_steps:str",
    "only reports": "--codecarbon-dir:str --log-level:str --log-level-replica:str --log-path:str",
    "--wandb-exp-name distinguishes runs": "--wandb_group:str",
    "gradients of what tensor ranks replicate are summed": "--sync-tp-duplicated-parameters",
    "no kernel has a shape that it cannot compute": "--abort-on-unmet-fused-kernel-constraints",
    "--num-workers holds for all splits": "--valid-num-workers:int",
    "there is no pipeline parallelism": """--no-pipeline-parallel --no-scatter-gather-tensors-in-pipeline
        --pp-partition-method:str --num-layers-per-virtual-pipeline-stage:int
        --enable-zbh1-pipeline --enable-zbh1-exact-semantics --overlap-p2p-communication
        --standalone-embedding-stage --pipeline-model-parallel-split-rank:int""",
    "every rank receives only its shard": "--zero-reduce-scatter",
    "gradients accumulate in flat buffers": "--zero-contigious-gradients --no-gradient-accumulation-fusion",
    "buffers hold one unit, such as a layer": """--zero-reduce-bucket-size:float
        --zero-allgather-bucket-size:float""",
    "offloaded states are pinned": "--use-pin-memory",
    "--fused-backend selects the AdamW implementation": "--cpu_torch_adam --ds_fused_adam",
    "gathers and reductions always overlap with computation": "--overlap-grad-reduce --overlap-param-gather",
    "gradients accumulate and are summed in fp32": "--accumulate-allreduce-grads-in-fp32",
    "--attention-backend selects the attention kernel, and other fusions affect speed only": """
        --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --no-persist-layer-norm
        --no-masked-softmax-fusion --no-bias-dropout-fusion --attention-softmax-in-fp32 --transformer-impl:str
        --no-rope-fusion --no-bias-swiglu-fusion --use-flash-attn-triton --use-flash-attn-builder""",
    "GELU is always the tanh approximation": "--no-bias-gelu-fusion --openai-gelu",
    "the result is the same": "--no-query-key-layer-scaling --apply-query-key-layer-scaling",
    "there is only one model": "--use-mcore-models --use-legacy-models",
    "initial weights depend on --seed only": "--use-cpu-initialization",
    "order and dropout depend on --seed and consumed samples only": "--no-save-rng --no-load-rng",
    "the first signal always saves and stops": "--exit-signal-handler",
    "files are read as needed, not mapped": "--mmap-warmup",
    "checkpoints have one format, described in docs/internals/checkpoints.md": "--ckpt-format:str",
    "--fused-backend selects the norms": "--disable-mem-efficient-ln",
    "data are read again for as long as the run lasts": "--repeated-dataloader",
    "always written to TensorBoard, W&B and --metrics-file": """--log-batch-size-to-tensorboard
        --no-log-learnig-rate-to-tensorboard""",
    "only reports, and norms of moments are not logged; --log-params-norm logs that of the weights": """
        --log-optimizer-states-to-tensorboard""",
    "the schedule always follows the flags": """--override-lr-scheduler --override-opt_param-scheduler
        --no-load-lr-state""",
}
_REFUSED = {
    "not supported: norms after the residual connection": "--apply-residual-connection-post-layernorm",
    "not supported: Xavier initialisation": "--init-method-xavier-uniform",
    "not supported: a residual stream in fp32": "--fp32-residual-connection",
    "not supported: a loss in fp16": "--fp16-lm-cross-entropy",
    "not supported: GPT-NeoX's files of settings; give flags, or --config": "--conf_dir --megatron_config",
    "not supported: autotuning; --dry-run compares settings": "--autotuning",
    "not supported: skipped iterations": "--skip-train-iteration-range",
    "not supported: objectives other than the next token": """--loss-on-targets-only --noise-density
        --mean-noise-span-length --reweight-loss-based-on-position-frequency""",
    OPTIMIZERS: "--use-bnb-optimizer",
    "use megatron-zpp evaluate": "--eval-only",
    "not supported: weighted ranges of data sets": """--train-weighted-split-paths
        --valid-weighted-split-paths --test-weighted-split-paths --train-weighted-split-paths-path
        --valid-weighted-split-paths-path --test-weighted-split-paths-path""",
    "use megatron-zpp sample to generate text": "--ds-inference --inference",
    _FEEDBACK: "--zero-gradient-error-feedback",
    "not supported: FP8 with e4m3 alone; use --fp8": "--fp8-e4m3",
    EXPERTS: """--mlp-type --topk --expert-interval --num-experts-switch --use-tutel --create-moe-param-group
        --enable-expert-tensor-parallelism --disable-moe-token-dropping
        --disable-moe-top2-2nd-expert-sampling""",
    DISTILLATION: """--load-teacher --num-layers-teacher --hidden-size-teacher --num-experts-teacher
        --num-attention-heads-teacher --mos --kd --kd-alpha-ce --kd-beta-ce --kd-temp""",
    "not supported: retrieval (RETRO)": """--retro-workdir --retro-add-retriever
        --retro-cyclic-train-iters --retro-encoder-layers --retro-encoder-hidden-dropout
        --retro-encoder-attention-dropout --retro-num-neighbors --retro-num-retrieved-chunks
        --retro-return-doc-ids""",
    "not supported: random layerwise token dropping": "--random-ltd",
    CURRICULUM: """--data-efficiency-curriculum-learning --return-data-index --train-idx-path
        --train-desc-path --train-doc-idx-path --train-sample-idx-path --train-shuffle-idx-path""",
    "use --train-samples or --train-iters": "--train-data-exact-num-epochs",
    "name the data in --data-path": "--aml-data-download-path",
    "not supported: runs that only build data sets": "--use-dataset-only",
    _LONG: """--force-ds-sequence-parallel --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size
        --ds-sequence-parallel-fpdt-offloading""",
    "not supported: embeddings in fp32": "--embedding-weights-in-fp32",
    "use --ckpt-step": "--load-tag",
    "use --finetune, which loads weights only and starts at iteration 0": "--reset-iteration",
    _WEIGHT_DECAY: "--start-weight-decay --end-weight-decay",
}
IDLE, REFUSED = idle(_IDLE), refused(_REFUSED)

RETIRED = (  # flags of this program, whose fields may be in settings files and in checkpoints
    retired("--gemm-algorithms", "heuristic", "torch always chooses the algorithms of matmuls"),
    retired(
        "--fp8-products",
        "always",
        "--fp8 always computes the matmuls of layers on 8-bit floats",
        "no layer is timed any more; omit it, and below --hidden-size 2048, where no step was measured to be "
        "faster with --fp8, omit --fp8 too",
    ),
    retired("--fp8-margin", 0, "the largest magnitude of --fp8-recipe delayed always has the largest code"),
    *idle(
        {
            "tensor ranks always exchange activations beside matmuls where their GPUs can": """
                --tp-comm-overlap --no-tp-comm-overlap""",
            "TORCHINDUCTOR_CACHE_DIR names the cache of compiled kernels": "--compile-cache-dir:str",
            "traces are in profile, below --tensorboard-dir if that is given": "--profile-dir:str",
            "zeros of the gradient are not counted": "--log-num-zeros-in-grad",
            "MFU is relative to the data sheet of a known GPU": "--device-peak-tflops:float",
            "ranks wait --distributed-timeout-minutes for one another at the start too": """
                --preflight-timeout:float""",
            "copy engines are used if a trial at the start succeeds": "--zero-copy-engines:str",
            "matmuls always spare what NCCL needs over TCP": "--zero-spare-multiprocessors:str",
            "references are compared before each checkpoint is saved": "--zero-check-interval:int",
        }
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
    retired(
        "--wandb-mode",
        str,
        "the environment variable WANDB_MODE sets it",
        "set the environment variable WANDB_MODE instead",
    ),
    retired(
        "--plan-compute-share",
        float,
        "a plan takes the share of the peak that was measured or fitted for its GPU",
        "omit it, and multiply the planned compute by the share measured or fitted for its GPU / yours",
    ),
    retired("--max-nan-iterations", 10, "10 steps in a row with NaN or Inf always end a run"),
    *(
        retired(
            name, takes, _NO_SNAPSHOTS, f"{_NO_SNAPSHOTS}; omit it, and save more often with --async-save"
        )
        for name, takes in (("--buddy-snapshots", int), ("--buddy-directory", str))
    ),
    retired(
        "--zero-quantization-block", 256, "blocks have 256 elements, and those of unrotated gradients 128"
    ),
    retired(
        "--nccl-sockets",
        "auto",
        "2x2 where NCCL would use TCP with one socket",
        "omit it, and set NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, which are obeyed",
    ),
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

OLD_FLAGS: tuple[OldFlag, ...] = (
    *(*RENAMED, *ONLY, *IDLE, *REFUSED, *RETIRED),
    *(*RENAMED_TODAY, *ONLY_TODAY, *IDLE_TODAY, *REFUSED_TODAY),
)
