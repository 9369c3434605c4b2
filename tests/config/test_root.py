"""The command line of pretrain_gpt.py: Megatron-LM's names and defaults, and what is refused."""

import dataclasses

import pytest

from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import Config, parse_args

MINIMAL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
).split()

# Megatron-LM's flags and defaults that users have in their fingers (its arguments.py, core 0.12).
MEGATRON_DEFAULTS = {
    "model.make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by", 128),
    "model.norm_epsilon": ("--norm-epsilon", 1e-5),
    "model.init_method_std": ("--init-method-std", 0.02),
    "model.attention_dropout": ("--attention-dropout", 0.1),
    "model.hidden_dropout": ("--hidden-dropout", 0.1),
    "optimizer.weight_decay": ("--weight-decay", 0.01),
    "optimizer.clip_grad": ("--clip-grad", 1.0),
    "optimizer.adam_beta1": ("--adam-beta1", 0.9),
    "optimizer.adam_beta2": ("--adam-beta2", 0.999),
    "optimizer.adam_eps": ("--adam-eps", 1e-8),
    "training.seed": ("--seed", 1234),
    "learning_rate.min_lr": ("--min-lr", 0.0),
    "learning_rate.lr_decay_style": ("--lr-decay-style", "linear"),
    "precision.initial_loss_scale": ("--initial-loss-scale", 2.0**32),
    "precision.min_loss_scale": ("--min-loss-scale", 1.0),
    "precision.loss_scale_window": ("--loss-scale-window", 1000),
    "precision.hysteresis": ("--hysteresis", 2),
    "distributed.distributed_timeout_minutes": ("--distributed-timeout-minutes", 10),
    "evaluation.eval_iters": ("--eval-iters", 100),
    "evaluation.eval_interval": ("--eval-interval", 1000),
    "data.num_workers": ("--num-workers", 2),
    "logging.log_interval": ("--log-interval", 100),
}
OTHER_MEGATRON_FLAGS = """
    --ffn-hidden-size --kv-channels --max-position-embeddings --untie-embeddings-and-output-weights
    --global-batch-size --rampup-batch-size --train-samples --exit-interval --exit-duration-in-mins
    --lr-decay-iters --lr-decay-samples --lr-warmup-fraction --lr-warmup-iters --lr-warmup-samples
    --lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-iters --lr-wsd-decay-samples
    --save --load --save-interval --no-save-optim --no-load-optim --finetune --ckpt-step
    --exit-on-missing-checkpoint --fp16 --bf16 --loss-scale --distributed-backend --full-validation
    --data-path --train-data-path --valid-data-path --test-data-path --split --mock-data
    --tokenizer-type --tokenizer-model --vocab-file --merge-file
    --tensorboard-dir --wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity
    --recompute-activations --recompute-granularity --recompute-method --recompute-num-layers
""".split()


def parse(*extra: str) -> Config:
    return parse_args([*MINIMAL, *extra])


@pytest.mark.parametrize(("place", "flag", "default"), [(k, *v) for k, v in MEGATRON_DEFAULTS.items()])
def test_megatron_flags_keep_their_defaults(place: str, flag: str, default: object) -> None:
    part, field = place.split(".")
    assert getattr(getattr(parse(), part), field) == default
    assert getattr(getattr(parse(flag, str(default)), part), field) == default


@pytest.mark.parametrize("flag", OTHER_MEGATRON_FLAGS)
def test_megatron_flags_are_known(flag: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["--help"])
    assert left.value.code == 0
    assert f"  {flag}" in capsys.readouterr().out


def test_a_flag_beats_the_preset() -> None:
    config = parse_args([*MINIMAL[:5], *MINIMAL[-6:], "--model-preset", "345m", "--num-layers", "3"])
    assert (config.model.num_layers, config.model.hidden_size) == (3, 1024)
    assert config.model.ffn_hidden_size == 4 * 1024


@pytest.mark.parametrize("argv", [[], ["--bf16", "--recompute-activations"]])
def test_configuration_survives_json(argv: list[str]) -> None:
    config = parse(*argv)
    assert Config.from_json(config.to_json()) == config


def test_saved_settings_of_another_version_are_refused() -> None:
    saved = parse().to_json()
    saved["model"]["flux_capacitor"] = 1
    with pytest.raises(ValueError, match="flux_capacitor"):
        Config.from_json(saved)


def test_parts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().model.num_layers = 5


def without(flag: str) -> list[str]:
    position = MINIMAL.index(flag)
    return [*MINIMAL[:position], *MINIMAL[position + 2 :]]


BAD = [  # command line, then what its one line must hold
    (without("--num-layers"), ["--num-layers", "--model-preset"]),
    (without("--hidden-size"), ["--hidden-size", "--model-preset"]),
    (without("--micro-batch-size"), ["--micro-batch-size"]),
    (without("--train-iters"), ["--train-iters", "--train-samples"]),
    (without("--lr"), ["--lr"]),
    (without("--vocab-size"), ["NullTokenizer", "--vocab-size"]),
    (without("--tokenizer-type"), ["--vocab-size 100", "--tokenizer-type"]),
    ([*MINIMAL, "--train-samples", "100"], ["--train-iters 10", "--train-samples"]),
    ([*MINIMAL, "--num-attention-heads", "5"], ["--num-attention-heads 5", "64", "--kv-channels"]),
    ([*MINIMAL, "--max-position-embeddings", "16"], ["--seq-length 32", "--max-position-embeddings 16"]),
    ([*MINIMAL, "--hidden-dropout", "1"], ["--hidden-dropout 1", "below 1"]),
    ([*MINIMAL, "--lr", "nan"], ["--lr nan", "finite"]),
    ([*MINIMAL, "--lr", "0"], ["--lr 0", "above 0"]),
    ([*MINIMAL, "--min-lr", "1"], ["--min-lr 1", "--lr 0.001"]),
    ([*MINIMAL, "--lr-warmup-init", "1"], ["--lr-warmup-init 1", "--lr 0.001"]),
    (
        [*MINIMAL, "--lr-warmup-iters", "5", "--lr-warmup-fraction", "0.1"],
        ["--lr-warmup-iters 5", "--lr-warmup-fraction"],
    ),
    ([*MINIMAL, "--lr-warmup-samples", "5"], ["--lr-warmup-samples 5", "--lr-warmup-iters"]),
    ([*MINIMAL, "--lr-decay-samples", "5"], ["--lr-decay-samples 5", "--lr-decay-iters"]),
    ([*MINIMAL, "--lr-decay-style", "WSD"], ["WSD", "--lr-wsd-decay-iters"]),
    ([*MINIMAL, "--lr-wsd-decay-iters", "5"], ["--lr-wsd-decay-iters 5", "WSD"]),
    ([*MINIMAL, "--fp16", "--bf16"], ["--fp16", "--bf16"]),
    ([*MINIMAL, "--loss-scale", "8"], ["--loss-scale 8", "--fp16"]),
    ([*MINIMAL, "--min-loss-scale", "1e20"], ["--min-loss-scale 1e+20", "--initial-loss-scale"]),
    ([*MINIMAL, "--recompute-method", "block"], ["--recompute-method block", "full"]),
    ([*MINIMAL, "--recompute-granularity", "full"], ["--recompute-granularity full", "--recompute-method"]),
    ([*MINIMAL, "--recompute-num-layers", "2"], ["--recompute-num-layers 2", "full"]),
    (
        [*MINIMAL, *"--recompute-granularity full --recompute-method block --recompute-num-layers 3".split()],
        ["--recompute-num-layers 3", "--num-layers 2"],
    ),
    (
        [*MINIMAL, "--recompute-activations", "--recompute-granularity", "full"],
        ["--recompute-granularity full", "--recompute-activations"],
    ),
    ([*MINIMAL, "--rampup-batch-size", "2", "2", "8"], ["--rampup-batch-size 2 2 8", "--train-samples"]),
    ([*MINIMAL, "--save-interval", "5"], ["--save-interval 5", "--save"]),
    ([*MINIMAL, "--no-save-optim"], ["--no-save-optim", "--save"]),
    ([*MINIMAL, "--finetune"], ["--finetune", "--load"]),
    ([*MINIMAL, "--ckpt-step", "5"], ["--ckpt-step 5", "--load"]),
    ([*MINIMAL, "--no-load-optim"], ["--no-load-optim", "--load"]),
    ([*MINIMAL, "--wandb-exp-name", "a"], ["--wandb-exp-name a", "--wandb-project"]),
    ([*MINIMAL, "--zero-stage", "4"], ["--zero-stage 4", "at most 3"]),
    ([*MINIMAL, "--zero-prefetch-units", "-1"], ["--zero-prefetch-units -1", "at least 0"]),
    (
        [*MINIMAL, "--zero-stage", "2", "--zero-prefetch-units", "1"],
        ["--zero-prefetch-units 1", "needs --zero-stage 3"],
    ),
    ([*MINIMAL, "--zero-quantized-weights"], ["--zero-quantized-weights (given)", "--zero-stage 1, 2 or 3"]),
    ([*MINIMAL, "--zero-quantized-gradients"], ["--zero-quantized-gradients (given)", "--zero-stage 1"]),
    (
        [*MINIMAL, "--zero-stage", "2", "--zero-hpz-partition-size", "4"],
        ["--zero-hpz-partition-size 4", "needs --zero-stage 3"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-hpz-partition-size", "node"],
        ["--zero-hpz-partition-size node", "whole number of ranks, or auto"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-hpz-partition-size", "0"],
        ["--zero-hpz-partition-size 0", "whole number of ranks"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantized-weights", "--zero-hpz-secondary", "quantized"],
        ["--zero-hpz-secondary quantized", "needs --zero-hpz-partition-size"],
    ),
    (
        [*MINIMAL, *"--zero-stage 3 --zero-hpz-partition-size auto --zero-hpz-secondary quantized".split()],
        ["--zero-hpz-secondary quantized", "needs --zero-quantized-weights"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantized-weights-format", "fp8"],
        ["--zero-quantized-weights-format fp8", "needs --zero-quantized-weights"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantized-gradients-format", "int8"],
        ["--zero-quantized-gradients-format int8", "needs --zero-quantized-gradients"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-gradient-error-feedback"],
        ["--zero-gradient-error-feedback", "needs --zero-quantized-gradients"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantization-block", "64"],
        ["--zero-quantization-block 64", "needs --zero-quantized-weights or"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantized-weights", "--zero-quantization-block", "96"],
        ["--zero-quantization-block 96", "power of two from 32 to 2048"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantized-weights", "--zero-quantization-block", "4096"],
        ["--zero-quantization-block 4096", "at most 2048"],
    ),
    (
        [*MINIMAL, "--zero-stage", "3", "--zero-quantized-gradients", "--grad-reduce-in-bf16"],
        ["--grad-reduce-in-bf16", "contradicts --zero-quantized-gradients"],
    ),
    ([*MINIMAL, "--recompute-offload"], ["--recompute-offload", "needs --recompute-granularity full"]),
    ([*MINIMAL, "--device", "cpu", "--distributed-backend", "nccl"], ["--distributed-backend nccl", "gloo"]),
    ([*MINIMAL, "--full-validation"], ["--full-validation", "--mock-data", "--eval-iters"]),
    ([*MINIMAL, "--seed", "-1"], ["--seed -1", "at least 0"]),
    ([*MINIMAL, "--num-workers", "-1"], ["--num-workers -1", "at least 0"]),
    ([*MINIMAL, "--vocab-file", "x"], ["--vocab-file x", "NullTokenizer"]),
    ([*MINIMAL, "--model-preset", "9b"], ["--model-preset", "9b", "13b"]),
]


@pytest.mark.parametrize(("argv", "words"), BAD, ids=[" ".join(words) for _, words in BAD])
def test_what_cannot_be_right_is_refused_in_one_line(argv: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_args(argv)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
