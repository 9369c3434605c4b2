"""Command lines of pretrain_gpt.py that cannot be right: wrong values, contradicting flags.

Bounds of a single value are those of its field, and old flags have tests of their own (tests/config/).
"""

from tests.faults.cases import Case, fifo, locked, put
from tests.faults.cases import refused as bad

COMPACT = "--optimizer muon --use-precision-aware-optimizer"
ROPE = "--position-embedding-type rope"
WSD = "--lr-decay-style WSD"
MUP, APEX = "--use-mup --mup-base-hidden-size 8", "--fused-backend apex"
FULL, WIDE = "--recompute-granularity full", "--fp32-residual-connection"
QGZ = "--zero-stage 3 --zero-quantized-gradients"
MOCK = "--mock-data"
EIGHT = "--dry-run --plan-gpus-per-node 8"

FLAGS = [
    bad("--num-layer 3", "--num-layer 3 … did you mean --num-layers?"),
    bad("--flux 3", "--flux 3 … --help"),
    bad("stray", "stray … --help"),
    bad("--num-layers", "--num-layers: expected one argument"),
    bad("--num-layers two", "--num-layers two: must be a whole number"),
    bad("--bf16 yes", "yes"),
    bad("--rampup-batch-size 4 4", "--rampup-batch-size: expected 3 arguments"),
    bad("--device tpu", "--device tpu: must be auto, cpu or cuda"),
    bad("--save=", "--save '': must not be empty"),
]

MODEL = [
    bad("", "--num-layers … --model-preset", without="--num-layers"),
    bad("--num-layers 0", "--num-layers 0: must be at least 1"),
    bad("--hidden-size 1000000000", "--hidden-size 1000000000: must be at most 1048576"),
    bad("--num-attention-heads 5", "--num-attention-heads 5: must divide --hidden-size 16 … --kv-channels"),
    bad("--max-position-embeddings 16", "--seq-length 32: … at most --max-position-embeddings 16"),
    bad("--make-vocab-size-divisible-by 9999999999", "--make-vocab-size-divisible-by 9999999999: … at most"),
    bad("--hidden-dropout 1", "--hidden-dropout 1.0: must be below 1"),
    bad("--norm-epsilon 0", "--norm-epsilon 0.0: must be above 0"),
    bad("--model-preset 9b", "--model-preset 9b: is neither a file nor a preset; use one of … 13b"),
    bad("--swiglu --squared-relu", "--squared-relu (given): contradicts --swiglu; give one"),
    bad("--rotary-base 500", "--rotary-base 500.0: needs --position-embedding-type rope"),
    bad(f"{ROPE} --rope-scaling-factor 8.0", ": needs --use-rope-scaling"),
    bad(
        "--position-embedding-type yarn",
        "--yarn-original-max-position-embeddings (not given): … yarn needs the length of text before it",
    ),
    bad(
        "--position-embedding-type longrope --yarn-original-max-position-embeddings 4",
        "longrope_short_factor (not given): must be",
    ),
    bad(
        f"{ROPE} --rotary-ntk-factor 2 --use-rope-scaling",
        " (given): contradicts --rotary-ntk-factor; give one",
    ),
    bad(f"{ROPE} --kv-channels 5", "--rotary-percent 1.0: rotates 5 of --kv-channels 5; must be even"),
    bad("--num-query-groups 1", "--num-query-groups 1: needs --group-query-attention"),
    bad("--tensor-model-parallel-size 3", ": must divide --num-attention-heads 2; possible: 1"),
    bad(
        "--ffn-hidden-size 63 --tensor-model-parallel-size 2",
        ": must divide --ffn-hidden-size 63; possible: 1",
    ),
    bad(
        f"{EIGHT} --tensor-model-parallel-size 2 --fp8 --bf16",
        "--tensor-model-parallel-size 2: leaves 1 × --kv-channels 8 outputs of keys per rank; must be a "
        "multiple of 16 with --fp8; possible: 1, or --kv-channels in multiples of 16",
    ),
    bad("--context-parallel-size 2", "--context-parallel-size 2: needs --attention-dropout 0, not 0.1"),
    bad(
        "--context-parallel-size 2 --attention-dropout 0 --seq-length 30",
        "--context-parallel-size 2: needs --seq-length in multiples of 4, not 30",
    ),
    bad(
        "--context-parallel-size 4 --attention-dropout 0 --cp-comm-type a2a",
        "--context-parallel-size 4: must divide --num-attention-heads 2 with --cp-comm-type a2a; use p2p",
    ),
    bad("--group-query-attention --num-query-groups 3", "--num-query-groups 3: must divide --num-attention"),
    bad(WIDE, f"{WIDE} (given): needs --bf16 or --fp16"),
    bad(f"{WIDE} --bf16 --norm-placement after", f"{WIDE} (given): … needs before or both"),
    bad(f"{WIDE} --bf16 --fused-backend apex", f"{WIDE} (given): needs --fused-backend torch"),
    bad(f"--apply-layernorm-1p {APEX}", "--apply-layernorm-1p (given): needs --fused-backend torch"),
    bad("--mup-base-hidden-size 8", ": needs --use-mup"),
    bad(f"{MUP} --mup-embedding-mult 3", "--embedding-multiplier 3.0: scales tokens alone, and muP"),
    bad(f"{MUP} {APEX}", "--use-mup (given): needs --fused-backend torch"),
    bad("--recompute-method block", "--recompute-method block: needs --recompute-granularity full"),
    bad(FULL, f"{FULL}: needs --recompute-method uniform or block"),
    bad(f"{FULL} --recompute-method block --recompute-num-layers 3", ": … at most --num-layers 2"),
    bad(f"{FULL} --recompute-activations", f"{FULL}: contradicts --recompute-activations"),
    bad("--recompute-offload", "--recompute-offload (given): needs --recompute-granularity full"),
]

TRAINING = [
    bad("", "--micro-batch-size (not given): give", without="--micro-batch-size"),
    bad("--micro-batch-size 1000000000000", "--micro-batch-size 1000000000000: must be at most"),
    bad("", "--train-iters (not given): … --train-samples", without="--train-iters"),
    bad("--train-samples 100", "--train-iters 2: give exactly one of … --train-samples"),
    bad("--rampup-batch-size 2 2 8", "--rampup-batch-size 2 2 8: needs --train-samples"),
    bad(
        "--train-samples 100 --rampup-batch-size 4 4 50",
        ": needs --train-samples N and --global-batch-size N",
        without="--train-iters",
    ),
]

OPTIMIZER = [
    bad("", "--lr (not given): give the peak", without="--lr"),
    bad("--lr nan", "--lr nan: must be a finite number"),
    bad("--min-lr 1", "--min-lr 1.0: must be at most --lr 0.001"),
    bad("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", ": contradicts --lr-warmup-fraction"),
    bad("--lr-warmup-samples 5", "--lr-warmup-samples 5: … use --lr-warmup-iters"),
    bad(WSD, f"{WSD}: needs one of --lr-wsd-decay-iters"),
    bad("--lr-wsd-decay-iters 5", f"--lr-wsd-decay-iters 5: needs {WSD}"),
    bad("--decoupled-min-lr 1e-5", "--decoupled-min-lr 1e-05: needs --decoupled-lr"),
    bad(
        "--decoupled-lr 1e-5 --min-lr 1e-4", "--decoupled-min-lr 0.0001: must be at most --decoupled-lr 1e-05"
    ),
    bad(f"--decoupled-lr 1e-3 {APEX}", "--decoupled-lr 0.001: needs --fused-backend torch"),
    bad("--adam-beta1 1", "--adam-beta1 1.0: must be below 1"),
    bad("--fp16 --bf16", "--fp16 (given): contradicts --bf16"),
    bad("--loss-scale 8", "--loss-scale 8.0: needs --fp16"),
    bad("--exp-avg-dtype fp8", "--exp-avg-dtype fp8: needs --use-precision-aware-optimizer"),
    bad(f"{COMPACT} --main-params-dtype bf16+8", "--main-params-dtype bf16+8: needs --optimizer adam"),
    bad(f"{COMPACT} --exp-avg-dtype fp8", "--exp-avg-dtype fp8: must be fp32 or bf16 with --optimizer muon"),
    bad("--optimizer muon --clip-grad 0 --optimizer-in-backward", " (given): needs --optimizer adam"),
    bad("--min-loss-scale 1e20", "--min-loss-scale 1e+20: must be at most --initial-loss-scale"),
    bad("--fp8 --fp16", "--fp8 (given): needs --bf16, not --fp16"),
    bad("--fp8-recipe delayed", "--fp8-recipe delayed: needs --fp8"),
    bad("--bf16 --fp8-param-gather", "--fp8-param-gather (given): needs --fp8"),
    bad(
        "--fp8 --bf16 --kv-channels 16 --fp8-recipe delayed --fp8-param-gather --zero-stage 1 "
        "--zero-quantized-weights",
        "--zero-quantized-weights in int8 would gather other codes; use --zero-quantized-weights-format "
        "delta4, or omit",
    ),
    bad("--bf16 --fp8-output-layer", "--fp8-output-layer (given): needs --fp8"),
    bad("--fp8 --bf16 --fp8-recipe tensorwise --fp8-output-layer", " (given): needs --fp8-recipe delayed"),
    bad("--fp8 --bf16 --hidden-size 24", "--hidden-size 24: is 24; must be a multiple of 16"),
    bad(
        "--fp8 --bf16 --kv-channels 3", "--kv-channels 3 × --num-attention-heads 2: is 6; must be a multiple"
    ),
    bad("--fp8 --bf16 --seq-length 30", "--micro-batch-size 4 × --seq-length 30: is 120; must be a multiple"),
]

ZERO = [
    bad("--zero-stage 4", "--zero-stage 4: must be at most 3"),
    bad("--zero-stage 3 --zero-table-rows 64", "--zero-table-rows 64: omit it; the loss is computed in ch"),
    bad("--zero-stage 2 --zero-prefetch-units 1", "--zero-prefetch-units 1: needs --zero-stage 3"),
    bad("--zero-quantized-weights", "--zero-quantized-weights (given): needs --zero-stage 1, 2 or 3"),
    bad("--zero-stage 3 --zero-hpz-partition-size node", "--zero-hpz-partition-size node: … or auto"),
    bad("--zero-stage 3 --zero-hpz-partition-size 0", "--zero-hpz-partition-size 0: must be a whole number"),
    bad("--zero-gradient-partition-size auto", ": … needs --zero-stage 1, 2 or 3"),
    bad("--zero-stage 3 --zero-gradient-partition-size node", ": … whole number"),
    bad("--zero-stage 3 --zero-gradient-partition-size 0", ": … whole number"),
    bad("--zero-stage 3 --zero-quantized-weights-format delta4", ": needs --zero-quantized-weights"),
    bad("--zero-quantized-weights-format=fp8", "--zero-quantized-weights-format fp8: is retired; use int8"),
    bad("--zero-stage 3 --zero-quantized-gradients-format rotated4", ": needs --zero-quantized-gradients"),
    bad(f"{QGZ} --grad-reduce-in-bf16", " (given): contradicts --zero-quantized-gradients"),
]

PLACES = [
    bad("--heartbeat-timeout 600", "--heartbeat-timeout 600.0: … --distributed-timeout-minutes 10"),
    bad("--heartbeat-timeout 1e9", "--heartbeat-timeout 1000000000.0: … --distributed-timeout-minutes 10"),
    bad("--save-interval 5", "--save-interval 5: needs --save"),
    bad("--keep-last 2", "--keep-last 2: needs --save"),
    bad("--save new --keep-last 0", "--keep-last 0: must be at least 1"),
    bad("--save new --keep-every 3", "--keep-every 3: needs --keep-last"),
    bad("--finetune", "--finetune (given): needs --load"),
    bad("--ckpt-step 5", "--ckpt-step 5: needs --load"),
    bad("--sample-prompt 5 --eval-iters 0", "--sample-prompt 5: needs evaluations; --eval-iters is 0"),
    bad("--load hf:", "--load hf:: names no directory"),
    bad("--load hf:hf --ckpt-step 5", "--ckpt-step 5: --load hf:hf has no iterations; omit it"),
    bad("--save hf:new", "--save hf:new: name a directory without hf: … megatron-zpp export"),
    bad(
        "--deterministic-mode --attention-backend fused",
        "--attention-backend fused: contradicts --deterministic-mode: its backward sums in no fixed",
    ),
    bad(
        "--deterministic-mode --attention-backend flash3",
        "--attention-backend flash3: contradicts --deterministic-mode: not all its releases",
    ),
    bad("--use-checkpoint-args", " (given): needs --load"),
    bad("--use-checkpoint-args --load hf:x", "--use-checkpoint-args (given): --load hf:x has no arguments"),
    bad("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint (given): needs --load"),
    bad("--wandb-exp-name a", "--wandb-exp-name a: needs --wandb-project"),
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
    bad("--data-path 0.5 text text", "--data-path 0.5 text text: … a weight before each"),
    bad("--data-path text.jsonl text", "--data-path text.jsonl text: put a weight before each"),
    bad("--data-path text.jsonl --dataset-order megatron", ": text.jsonl … preprocess"),
    bad("--data-path text.jsonl --verify-data", "--verify-data (given): text has no .bin … omit this"),
    bad("--append-eod", "--append-eod (given): applies to text … omit it"),
    bad("--data-path 0 text", "--data-path 0 text: the weight 0 must be a positive"),
    bad("", "NullTokenizer: needs --vocab-size", without="--vocab-size"),
    bad("", "--vocab-size 256: … no --tokenizer-type", without="--tokenizer-type"),
    bad("", "--tokenizer-type (not given): give", without="--tokenizer-type --vocab-size"),
    bad("--vocab-file x", "--vocab-file x: has no meaning with --tokenizer-type NullTokenizer"),
    bad("--tokenizer-type SentencePieceTokenizer", "SentencePieceTokenizer: needs --tokenizer-model"),
]

COMMAND_LINES = [*FLAGS, *MODEL, *TRAINING, *OPTIMIZER, *ZERO, *PLACES, *DATA]

CHECKED = [  # what the command line alone does not show
    bad("--tensor-model-parallel-size 2", ": must divide the 1 rank of a node; possible: 1"),
    Case(
        f"{EIGHT} --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 1",
        "--tensor-model-parallel-size 2: must divide the 257 rows of the padded vocabulary; use 1, or a "
        "--make-vocab-size-divisible-by that is a multiple of 2, such as 2, not 1",
        without="--device",
    ),
    bad(
        f"{EIGHT} --tensor-model-parallel-size 6 --num-attention-heads 12 --kv-channels 4 "
        "--ffn-hidden-size 72 --seq-length 48",
        "--tensor-model-parallel-size 6: must divide the 8 ranks of a node; possible: 1, 2, 4",
    ),
    Case("--attention-backend flash3", ": its kernels need a Hopper GPU; … use auto"),
    Case("--eod-mask-loss", "--eod-mask-loss (given): text.bin has no end of document (token 256) … omit"),
    bad("--lr-warmup-iters 5", "--lr-warmup-iters 5: must end before the decay does, at 2 iterations of 4"),
    bad(f"{WSD} --lr-wsd-decay-iters 9", "--lr-wsd-decay-iters 9: must fit … into 2 iterations of 4"),
    Case("--fp8", "--fp8 (given): needs --bf16, which is not the default on the cpu"),
    Case(
        "--fp8 --bf16 --fp8-recipe delayed --fp8-output-layer --make-vocab-size-divisible-by 1",
        "--fp8-output-layer (given): needs a multiple of 16 entries in the padded vocabulary, not",
    ),
    bad("--compile --fused-backend apex", "--compile (given): needs --fused-backend torch"),
    Case("--zero-offload-optimizer", "--zero-offload-optimizer (given): … omit it", status=2),
    Case("--fused-backend apex", "--fused-backend apex: … use torch", status=2),
    Case(
        f"{FULL} --recompute-method uniform --recompute-offload",
        " (given): needs GPUs; this run is on the cpu",
    ),
    Case(
        "--device cuda --save new --metrics-file other/new",
        "--device cuda: torch sees no GPU here; use --device cpu",
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Case("--vocab-size 99999999999", "--vocab-size 99999999999: … less than 2147483648"),
    bad(
        "--deepspeed_config ds.json",
        "--global-batch-size 6: … --micro-batch-size 4 × 1 … such as 4 or 8",
        harm=put("ds.json", '{"train_batch_size": 6}'),
    ),
    bad("--deepspeed_config file", ": cannot be read (Permission", harm=locked("file")),
    bad("--config run.yaml", "run.yaml: cannot be read (is a FIFO, not", harm=fifo("run.yaml")),
    bad("--config run.yaml", "line 1", harm=put("run.yaml", "seed: !!python/object:os.system {}\n")),
    bad("--config file", "--config file: cannot be read (Permission denied)", harm=locked("file")),
]
