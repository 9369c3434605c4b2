"""Command lines of pretrain_gpt.py that cannot be right: wrong values, contradicting flags."""

from tests.faults.cases import Case
from tests.faults.cases import refused as bad

WSD = "--lr-decay-style WSD"
FULL = "--recompute-granularity full"
MOCK = "--mock-data"
EIGHT = "--dry-run --plan-gpus-per-node 8"

FLAGS = [
    bad("--num-layer 3", "--num-layer 3 … did you mean --num-layers?"),
    bad("--flux 3", "--flux 3 … --help"),
    bad("stray", "stray … --help"),
    bad("--num-layers", "--num-layers: expected one argument"),
    bad("--num-layers two", "--num-layers: invalid int value: 'two'"),
    bad("--seed 1.5", "--seed: invalid int value: '1.5'"),
    bad("--lr fast", "--lr: invalid float value: 'fast'"),
    bad("--bf16 yes", "yes"),
    bad("--rampup-batch-size 4 4", "--rampup-batch-size: expected 3 arguments"),
    bad("--device tpu", "--device: invalid choice: 'tpu' … 'cpu'"),
    bad("--lr-decay-style cosin", "--lr-decay-style: invalid choice: 'cosin' … 'cosine'"),
    bad("--tokenizer-type Word", "--tokenizer-type: invalid choice: 'Word' … 'NullTokenizer'"),
    bad("--save=", "--save '': must not be empty"),
    bad("--data-path=", "--data-path '': must not be empty"),
    bad("--metrics-file=", "--metrics-file '': must not be empty"),
]

MODEL = [
    bad("", "--num-layers … --model-preset", without="--num-layers"),
    bad("", "--hidden-size … --model-preset", without="--hidden-size"),
    bad("--num-layers 0", "--num-layers 0: must be at least 1"),
    bad("--num-layers 1000000000", "--num-layers 1000000000: must be at most 10000"),
    bad("--hidden-size -1", "--hidden-size -1: must be at least 1"),
    bad("--hidden-size 1000000000", "--hidden-size 1000000000: must be at most 1048576"),
    bad("--num-attention-heads 5", "--num-attention-heads 5: must divide --hidden-size 16 … --kv-channels"),
    bad("--max-position-embeddings 16", "--seq-length 32: … at most --max-position-embeddings 16"),
    bad("--seq-length 0", "--seq-length 0: must be at least 1"),
    bad("--kv-channels 0", "--kv-channels 0: must be at least 1"),
    bad("--make-vocab-size-divisible-by 9999999999", "--make-vocab-size-divisible-by 9999999999: … at most"),
    bad("--hidden-dropout 1", "--hidden-dropout 1.0: must be below 1"),
    bad("--attention-dropout -0.1", "--attention-dropout -0.1: must be at least 0"),
    bad("--norm-epsilon 0", "--norm-epsilon 0.0: must be above 0"),
    bad("--init-method-std -1", "--init-method-std -1.0: must be above 0"),
    bad("--model-preset 9b", "--model-preset 9b: is neither a file nor a preset; use one of … 13b"),
    bad("--position-embedding-type alibi", "--position-embedding-type: invalid choice: 'alibi' … 'rope'"),
    bad("--rotary-base 500", "--rotary-base 500.0: needs --position-embedding-type rope"),
    bad("--use-rope-scaling", "--use-rope-scaling (given): needs --position-embedding-type rope"),
    bad(
        "--position-embedding-type rope --rope-scaling-factor 8",
        "--rope-scaling-factor 8.0: needs --use-rope-scaling",
    ),
    bad(
        "--position-embedding-type rope --use-rope-scaling --rope-low-freq-factor 5",
        "--rope-low-freq-factor 5.0: only 1.0 is possible: all models of Llama 3 have it; omit it",
    ),
    bad(
        "--position-embedding-type rope --kv-channels 5",
        "--rotary-percent 1.0: rotates 5 of --kv-channels 5; must be even",
    ),
    bad("--num-query-groups 1", "--num-query-groups 1: needs --group-query-attention"),
    bad("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: must be at least 1"),
    bad(
        "--tensor-model-parallel-size 3",
        "--tensor-model-parallel-size 3: must divide --num-attention-heads 2; possible: 1",
    ),
    bad(
        "--tensor-model-parallel-size 2 --ffn-hidden-size 63",
        "--tensor-model-parallel-size 2: must divide --ffn-hidden-size 63; possible: 1",
    ),
    bad(
        "--tensor-model-parallel-size 2 --seq-length 31",
        "--tensor-model-parallel-size 2: must divide --seq-length 31; possible: 1",
    ),
    bad(
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2: must divide the 1 rank of a node; possible: 1",
    ),
    Case(
        f"{EIGHT} --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1",
        "--tensor-model-parallel-size 2: must divide the 257 rows of the padded vocabulary; use 1, or a "
        "--make-vocab-size-divisible-by that is a multiple of 2, such as 2, not 1",
        without="--device",
    ),
    bad(
        f"{EIGHT} --tensor-model-parallel-size 8 --num-attention-heads 12 --kv-channels 4",
        "--tensor-model-parallel-size 8: must divide --num-attention-heads 12; possible: 1, 2, 4",
    ),
    bad(
        f"{EIGHT} --tensor-model-parallel-size 6 --num-attention-heads 12 --kv-channels 4 "
        "--ffn-hidden-size 72 --seq-length 48",
        "--tensor-model-parallel-size 6: must divide the 8 ranks of a node; possible: 1, 2, 4",
    ),
    bad(
        f"{EIGHT} --tensor-model-parallel-size 2 --fp8 --bf16",
        "--tensor-model-parallel-size 2: leaves 1 × --kv-channels 8 outputs of keys per rank; must be a "
        "multiple of 16 with --fp8; possible: 1, or --kv-channels in multiples of 16",
    ),
    bad(
        "--tp-comm-overlap",
        "--tp-comm-overlap (given): needs --tensor-model-parallel-size 2 or more: one rank",
    ),
    bad(
        f"{EIGHT} --tp-comm-overlap --tensor-model-parallel-size 2 --bf16 --fp8 --kv-channels 16",
        "--tp-comm-overlap (given): needs 16-bit products: those of --fp8 take the tokens … omit one",
    ),
    bad("--group-query-attention --num-query-groups 3", "--num-query-groups 3: must divide --num-attention"),
    bad("--swiglu --squared-relu", "--squared-relu (given): contradicts --swiglu; give one"),
    bad("--normalization BatchNorm", "--normalization: invalid choice: 'BatchNorm' … 'RMSNorm'"),
    bad("--attention-backend fast", "--attention-backend: invalid choice: 'fast' … 'flash'"),
    Case(
        "--attention-backend flash3", "--attention-backend flash3: its kernels need a Hopper GPU; … use auto"
    ),
    Case(
        "--attention-backend fused",
        "--attention-backend fused: cannot compute 32 tokens, --kv-channels 8, … in float32 on this cpu",
    ),
    Case("--eod-mask-loss", "--eod-mask-loss (given): text.bin has no end of document (token 256) … omit"),
    bad("--recompute-method block", "--recompute-method block: needs --recompute-granularity full"),
    bad(FULL, f"{FULL}: needs --recompute-method uniform or block"),
    bad("--recompute-num-layers 2", "--recompute-num-layers 2: needs --recompute-granularity full"),
    bad(
        f"{FULL} --recompute-method block --recompute-num-layers 3",
        "--recompute-num-layers 3: … at most --num-layers 2",
    ),
    bad(f"{FULL} --recompute-activations", f"{FULL}: contradicts --recompute-activations"),
    bad("--recompute-offload", "--recompute-offload (given): needs --recompute-granularity full"),
]

TRAINING = [
    bad("", "--micro-batch-size (not given): give", without="--micro-batch-size"),
    bad("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
    bad("--micro-batch-size 1000000000000", "--micro-batch-size 1000000000000: must be at most"),
    bad("", "--train-iters (not given): … --train-samples", without="--train-iters"),
    bad("--train-iters 0", "--train-iters 0: must be at least 1"),
    bad("--train-iters 9999999999999", "--train-iters 9999999999999: must be at most"),
    bad("--train-samples 100", "--train-iters 2: give exactly one of … --train-samples"),
    bad("--rampup-batch-size 2 2 8", "--rampup-batch-size 2 2 8: needs --train-samples"),
    bad(
        "--train-samples 100 --rampup-batch-size 4 4 50",
        "--rampup-batch-size 4 4 50: needs --train-samples N and --global-batch-size N",
        without="--train-iters",
    ),
    bad("--seed -1", "--seed -1: must be at least 0"),
    bad("--exit-interval 0", "--exit-interval 0: must be at least 1"),
    bad("--exit-duration-in-mins 0", "--exit-duration-in-mins 0.0: must be above 0"),
    bad("--eval-iters -1", "--eval-iters -1: must be at least 0"),
    bad("--eval-interval 0", "--eval-interval 0: must be at least 1"),
    bad("--log-interval 0", "--log-interval 0: must be at least 1"),
]

OPTIMIZER = [
    bad("", "--lr (not given): give the peak", without="--lr"),
    bad("--lr nan", "--lr nan: must be a finite number"),
    bad("--lr 1e400", "--lr inf: must be a finite number"),
    bad("--lr 0", "--lr 0.0: must be above 0"),
    bad("--min-lr 1", "--min-lr 1.0: must be at most --lr 0.001"),
    bad("--lr-warmup-init 1", "--lr-warmup-init 1.0: must be at most --lr 0.001"),
    bad("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5: must be at most 1"),
    bad("--lr-warmup-iters -1", "--lr-warmup-iters -1: must be at least 0"),
    bad(
        "--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
        "--lr-warmup-iters 5: contradicts --lr-warmup-fraction",
    ),
    bad("--lr-warmup-samples 5", "--lr-warmup-samples 5: … use --lr-warmup-iters"),
    bad("--lr-decay-samples 5", "--lr-decay-samples 5: … use --lr-decay-iters"),
    bad(WSD, f"{WSD}: needs one of --lr-wsd-decay-iters"),
    bad("--lr-wsd-decay-iters 5", f"--lr-wsd-decay-iters 5: needs {WSD}"),
    bad("--lr-warmup-iters 5", "--lr-warmup-iters 5: must end before the decay does, at 8 samples"),
    bad(f"{WSD} --lr-wsd-decay-iters 9", "--lr-wsd-decay-iters 9: must fit … into 8 samples"),
    bad("--weight-decay -1", "--weight-decay -1.0: must be at least 0"),
    bad("--clip-grad -1", "--clip-grad -1.0: must be at least 0"),
    bad("--adam-beta1 1", "--adam-beta1 1.0: must be below 1"),
    bad("--adam-beta2 -0.5", "--adam-beta2 -0.5: must be at least 0"),
    bad("--adam-eps 0", "--adam-eps 0.0: must be above 0"),
    bad("--fp16 --bf16", "--fp16 (given): contradicts --bf16"),
    bad("--fp32 --bf16", "--fp32 (given): contradicts --bf16"),
    bad("--loss-scale 8", "--loss-scale 8.0: needs --fp16"),
    bad("--fp16 --loss-scale 0", "--loss-scale 0.0: must be above 0"),
    bad("--min-loss-scale 1e20", "--min-loss-scale 1e+20: must be at most --initial-loss-scale"),
    bad("--hysteresis 0", "--hysteresis 0: must be at least 1"),
    bad("--fp8 --fp16", "--fp8 (given): needs --bf16, not --fp16"),
    Case("--fp8", "--fp8 (given): needs --bf16, which is not the default on the cpu"),
    bad("--fp8-recipe delayed", "--fp8-recipe delayed: needs --fp8"),
    bad("--fp8-margin 1", "--fp8-margin 1: needs --fp8"),
    bad("--fp8 --bf16 --fp8-recipe tensorwise --fp8-margin 0", "--fp8-margin 0: needs --fp8-recipe delayed"),
    bad(
        "--fp8 --bf16 --fp8-param-gather", "--fp8-param-gather (given): needs --fp8 and --fp8-recipe delayed"
    ),
    bad(
        "--fp8 --bf16 --kv-channels 16 --fp8-recipe delayed --fp8-param-gather --zero-stage 1 "
        "--zero-quantized-weights",
        "--zero-quantized-weights in int8 would gather other codes; use --zero-quantized-weights-format "
        "delta4 or delta2, or omit",
    ),
    bad("--fp8 --bf16 --fp8-products measured", "--fp8-products measured: only always is possible: "),
    bad("--gemm-algorithms measured", "--gemm-algorithms measured: only heuristic is possible: "),
    bad(
        "--fp8 --bf16 --fp8-output-layer", "--fp8-output-layer (given): needs --fp8 and --fp8-recipe delayed"
    ),
    Case(
        "--fp8 --bf16 --fp8-recipe delayed --fp8-output-layer --make-vocab-size-divisible-by 1",
        "--fp8-output-layer (given): needs a multiple of 16 entries in the padded vocabulary, not",
    ),
    bad("--fp8 --bf16 --fp8-recipe mxfp8", "--fp8-recipe: invalid choice: 'mxfp8'"),
    bad("--fp8 --bf16 --fp8-amax-history-len 0", "--fp8-amax-history-len 0: must be at least 1"),
    bad("--fp8 --bf16 --hidden-size 24", "--hidden-size 24: is 24; must be a multiple of 16"),
    bad(
        "--fp8 --bf16 --kv-channels 3", "--kv-channels 3 × --num-attention-heads 2: is 6; must be a multiple"
    ),
    bad("--fp8 --bf16 --seq-length 30", "--micro-batch-size 4 × --seq-length 30: is 120; must be a multiple"),
    Case("--compile --fused-backend apex", "--compile (given): torch.compile fuses norms"),
]

ZERO = [
    bad("--zero-stage 4", "--zero-stage 4: must be at most 3"),
    bad("--zero-stage 3 --zero-table-rows 0", "--zero-table-rows 0: must be at least 1"),
    bad("--zero-prefetch-units -1", "--zero-prefetch-units -1: must be at least 0"),
    bad("--zero-stage 2 --zero-prefetch-units 1", "--zero-prefetch-units 1: needs --zero-stage 3"),
    bad("--zero-quantized-weights", "--zero-quantized-weights (given): needs --zero-stage 1, 2 or 3"),
    bad("--zero-quantized-gradients", "--zero-quantized-gradients (given): needs --zero-stage 1"),
    bad("--zero-stage 2 --zero-hpz-partition-size 4", "--zero-hpz-partition-size 4: needs --zero-stage 3"),
    bad("--zero-stage 3 --zero-hpz-partition-size node", "--zero-hpz-partition-size node: … or auto"),
    bad("--zero-stage 3 --zero-hpz-partition-size 0", "--zero-hpz-partition-size 0: must be a whole number"),
    bad("--zero-stage 3 --zero-hpz-secondary quantized", "--zero-hpz-secondary quantized: only bf16 is"),
    bad(
        "--zero-stage 3 --zero-quantized-weights-format delta4",
        "--zero-quantized-weights-format delta4: needs --zero-quantized-weights",
    ),
    *(
        bad(f"--zero-quantized-weights-format {retired}", f"{retired}: is retired; use {current}")
        for retired, current in (("fp8", "int8"), ("int4", "int8"), ("delta3", "delta4"))
    ),
    bad(
        "--zero-quantized-gradients-format=fp8", "--zero-quantized-gradients-format fp8: is retired; use int8"
    ),
    bad(
        "--zero-stage 3 --zero-quantized-gradients-format int8",
        "--zero-quantized-gradients-format int8: needs --zero-quantized-gradients",
    ),
    bad(
        "--zero-stage 3 --zero-gradient-error-feedback",
        "--zero-gradient-error-feedback (given): not here: error feedback did not lower the loss",
    ),
    bad(
        "--zero-stage 3 --zero-quantized-weights --zero-check-interval 5",
        "--zero-check-interval 5: needs --zero-quantized-weights and --zero-quantized-weights-format delta4",
    ),
    bad("--zero-delta4-iterations 100", "--zero-delta4-iterations 100: not here: delta2 has 4 bits until"),
    bad(
        "--zero-stage 3 --zero-quantized-gradients-format rotated4",
        "--zero-quantized-gradients-format rotated4: needs --zero-quantized-gradients",
    ),
    bad(
        "--zero-stage 3 --zero-quantization-block 64",
        "--zero-quantization-block 64: needs --zero-quantized-weights or",
    ),
    bad(
        "--zero-stage 3 --zero-quantized-weights --zero-quantization-block 96",
        "--zero-quantization-block 96: must be a power of two from 32 to 2048",
    ),
    bad(
        "--zero-stage 3 --zero-quantized-weights --zero-quantization-block 4096",
        "--zero-quantization-block 4096: must be at most 2048",
    ),
    bad(
        "--zero-stage 3 --zero-quantized-gradients --grad-reduce-in-bf16",
        "--grad-reduce-in-bf16 (given): contradicts --zero-quantized-gradients",
    ),
    Case("--zero-offload-optimizer", "--zero-offload-optimizer (given): … omit it", status=2),
    Case("--fused-backend apex", "--fused-backend apex: … use torch", status=2),
    Case(
        f"{FULL} --recompute-method uniform --recompute-offload",
        "--recompute-offload (given): needs GPUs; this run is on the cpu",
    ),
    bad("--distributed-backend nccl", "--distributed-backend nccl: … gloo"),
    bad("--distributed-timeout-minutes 0", "--distributed-timeout-minutes 0.0: must be above 0"),
    bad("--distributed-timeout-minutes 1e300", "--distributed-timeout-minutes 1e+300: must be at most"),
    Case(
        "--device cuda --save new --metrics-file other/new",
        "--device cuda: torch sees no GPU here; use --device cpu",
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
]

PLACES = [
    bad("--save-interval 5", "--save-interval 5: needs --save"),
    bad("--no-save-optim", "--no-save-optim (given): needs --save"),
    bad("--async-save", "--async-save (given): needs --save"),
    bad("--keep-last 2", "--keep-last 2: needs --save"),
    bad("--save new --keep-last 0", "--keep-last 0: must be at least 1"),
    bad("--save new --keep-every 3", "--keep-every 3: needs --keep-last"),
    bad("--buddy-snapshots 5", "--buddy-snapshots 5: not here: states are copied to --save alone; omit it"),
    bad("--finetune", "--finetune (given): needs --load"),
    bad("--ckpt-step 5", "--ckpt-step 5: needs --load"),
    bad("--sample-tokens 5", "--sample-tokens 5: only 64 is possible: a sampled text always has 64 tokens"),
    bad("--sample-prompt 5 --eval-iters 0", "--sample-prompt 5: needs evaluations; --eval-iters is 0"),
    bad("--profile --profile-step-start 12", "--profile-step-end 12: must be above --profile-step-start 12"),
    bad("--timing-log-level 3", "argument --timing-log-level: invalid choice: '3'"),
    bad("--max-nan-iterations 3", "--max-nan-iterations 3: only 10 is possible: 10 steps in a row with NaN"),
    bad("--nccl-sockets 4", "--nccl-sockets 4: must be auto, off or THREADSxSOCKETS, such as 2x2"),
    bad("--nccl-sockets 8x9", "--nccl-sockets 8x9: makes 72 sockets … at most 64; give 8x8 or less"),
    Case("--nccl-sockets 2x2", "--nccl-sockets 2x2: needs --distributed-backend nccl, … gloo; omit it"),
    bad("--load hf:", "--load hf:: names no directory"),
    bad("--load hf:hf --ckpt-step 5", "--ckpt-step 5: --load hf:hf has no iterations; omit it"),
    bad("--save hf:new", "--save hf:new: name a directory without hf: … huggingface export"),
    bad("--no-load-optim", "--no-load-optim (given): needs --load"),
    bad("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint (given): needs --load"),
    bad("--wandb-exp-name a", "--wandb-exp-name a: needs --wandb-project"),
    bad("--wandb-save-dir a", "--wandb-save-dir a: needs --wandb-project"),
]

DATA = [
    bad("", "--data-path (not given): … --mock-data", without="--data-path --split"),
    bad("--data-path", "--data-path: expected at least one argument"),
    bad(MOCK, "--mock-data (given): … omit --data-path or --mock-data"),
    bad(
        f"{MOCK} --verify-data", "--verify-data (given): --mock-data reads no", without="--data-path --split"
    ),
    bad(f"{MOCK} --full-validation", "--full-validation … --eval-iters", without="--data-path --split"),
    bad("--valid-data-path text", "--valid-data-path (given): … give one or the other"),
    bad("--train-data-path text", "--split 80,10,10: … omit it with --train", without="--data-path"),
    bad("--split a,b", "--split a,b: must be up to three shares"),
    bad("--split 0,0,0", "--split 0,0,0: must be up to three shares"),
    bad("--split 1,2,3,4", "--split 1,2,3,4: must be up to three shares"),
    bad("--data-path 0.5 text text", "--data-path 0.5 text text: … a weight before each"),
    bad("--data-path text.jsonl text", "--data-path text.jsonl text: put a weight before each"),
    bad(
        "--data-path text.jsonl --dataset-order megatron", "--dataset-order megatron: text.jsonl … preprocess"
    ),
    bad("--data-path text.jsonl --verify-data", "--verify-data (given): text has no .bin … omit this"),
    bad("--append-eod", "--append-eod (given): applies to text … omit it"),
    bad("--skip-bad-lines", "--skip-bad-lines (given): applies to text … omit it"),
    bad("--json-key body", "--json-key body: applies to text … omit it"),
    bad("--data-path 0 text", "--data-path 0 text: the weight 0 must be a positive"),
    bad("--data-path nan text", "--data-path nan text: the weight nan must be"),
    bad("--num-workers -1", "--num-workers -1: must be at least 0"),
    bad("--num-workers 99999", "--num-workers 99999: must be at most 1024"),
    bad("", "NullTokenizer: needs --vocab-size", without="--vocab-size"),
    bad("", "--vocab-size 256: … no --tokenizer-type", without="--tokenizer-type"),
    bad("", "--tokenizer-type (not given): give", without="--tokenizer-type --vocab-size"),
    bad("--vocab-size 0", "--vocab-size 0: must be at least 1"),
    Case("--vocab-size 99999999999", "--vocab-size 99999999999: … less than 2147483648"),
    bad("--vocab-file x", "--vocab-file x: has no meaning with --tokenizer-type NullTokenizer"),
    bad("--tokenizer-type SentencePieceTokenizer", "SentencePieceTokenizer: needs --tokenizer-model"),
]

COMMAND_LINES = [*FLAGS, *MODEL, *TRAINING, *OPTIMIZER, *ZERO, *PLACES, *DATA]
