"""The command line of pretrain_gpt.py: Megatron-LM's names and defaults, and what is refused."""

import dataclasses
import json
import typing
from pathlib import Path

import pytest

from megatron_zpp.config.model import preset_fields
from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.config.sources.settings_file import DeepSpeedFile, SettingsFile
from tests.config.command_line import MINIMAL

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


def test_help_can_be_read_and_searched(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped by part; no word is cut, and only choices, which cannot be, are wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    parts = [*typing.get_type_hints(Config).values(), DeepSpeedFile, SettingsFile]
    assert titles == ["options:", *(f"{part.__doc__}:" for part in parts)]
    assert [line for line in lines if line.rstrip().endswith("-")] == []
    assert [line for line in lines if len(line) > 80 and "{" not in line and line not in titles] == []


@pytest.mark.parametrize("argv", [[], ["--bf16", "--recompute-activations"]])
def test_configuration_survives_json(argv: list[str]) -> None:
    config = parse(*argv)
    assert Config.from_json(config.to_json()) == config


def test_saved_settings_of_another_version_are_refused() -> None:
    saved = parse().to_json()
    saved["model"]["flux_capacitor"] = 1
    with pytest.raises(ValueError, match="flux_capacitor"):
        Config.from_json(saved)


def test_saved_settings_of_retired_flags_are_read() -> None:
    config = parse("--bf16", "--fp8", "--kv-channels", "16")
    saved = config.to_json()
    saved["compilation"]["gemm_algorithms"] = "measured"
    saved["precision"]["fp8_products"] = "measured"
    saved["memory_snapshots"] = {"buddy_snapshots": 5, "buddy_directory": "/dev/shm"}
    assert Config.from_json(saved) == config


@pytest.mark.parametrize(
    ("weights", "gradients", "now"),
    [
        ("fp8", "fp8", ("int8", "int8")),
        ("int4", "int4", ("int8", "int4")),
        ("delta3", "int8", ("delta4", "int8")),
    ],
)
def test_saved_retired_formats_become_present_ones(
    weights: str, gradients: str, now: tuple[str, str]
) -> None:
    config = parse("--zero-stage", "1", "--zero-quantized-weights", "--zero-quantized-gradients")
    saved = config.to_json()
    formats = ("zero_quantized_weights_format", "zero_quantized_gradients_format")
    saved["zero"] |= dict(zip(formats, (weights, gradients), strict=True))
    saved["zero"] |= {"zero_hpz_secondary": "quantized", "zero_delta4_iterations": 100}
    read = Config.from_json(saved).zero
    assert read == dataclasses.replace(config.zero, **dict(zip(formats, now, strict=True)))


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_layers_that_are_smaller_than_those_measured_with_fp8_get_a_note() -> None:
    speeds = []
    for name, run in (("throughput_fp8", "stage 0, fp8"), ("throughput_fp8_1.3b", "stage 0, fp8 codes")):
        steps = json.loads((RESULTS / f"{name}.json").read_text())["figures"]["1.3b:16"]
        speeds.append(steps["stage 0"]["milliseconds"] / steps[run]["milliseconds"])
    (note,) = parse("--bf16", "--fp8").precision.speed_notes(2032)
    assert "hidden size 2032 is below 2048, the smallest whose steps were measured to be faster" in note
    assert f"({speeds[0]:.2f} to {speeds[1]:.2f} times as fast as bf16's, on an H200)" in note
    assert preset_fields("1.3b")["hidden_size"] == 2048
    assert parse("--bf16", "--fp8").precision.speed_notes(2048) == []
    assert parse("--bf16").precision.speed_notes(64) == []
