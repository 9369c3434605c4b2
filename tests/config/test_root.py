"""The command line of pretrain_gpt.py: Megatron-LM's names and defaults, and what is refused."""

import dataclasses
import importlib.util
import json
import typing
from pathlib import Path

import pytest

from megatron_zpp.config.model import preset_fields
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.config.sources.settings_file import DeepSpeedFile, SettingsFile
from megatron_zpp.config.values.addresses import host_and_port, joined, read_secret
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.inputs import check_inputs
from megatron_zpp.train.setup.device import resolve_fused_backend
from tests.config.command_line import MINIMAL

# Megatron-LM's defaults that users have in their fingers (its arguments.py, core 0.12).
MEGATRON_DEFAULTS = (
    "--make-vocab-size-divisible-by 128 --norm-epsilon 1e-5 --init-method-std 0.02 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --weight-decay 0.01 --clip-grad 1 --adam-beta1 0.9 --adam-beta2 0.999 "
    "--adam-eps 1e-8 --seed 1234 --min-lr 0 --lr-decay-style linear --initial-loss-scale 4294967296 "
    "--min-loss-scale 1 --loss-scale-window 1000 --hysteresis 2 --distributed-timeout-minutes 10 "
    "--eval-iters 100 --eval-interval 1000 --num-workers 2 --log-interval 100"
).split()


def parse(*extra: str) -> Config:
    return parse_args([*MINIMAL, *extra])


def test_megatron_flags_keep_their_defaults() -> None:
    assert parse(*MEGATRON_DEFAULTS) == parse()


def test_help_can_be_read_and_searched(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped by part; no word is cut, and only choices, which cannot be, are wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_args(["--help", "all"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    parts = [*typing.get_type_hints(Config).values(), DeepSpeedFile, SettingsFile]
    assert titles == ["options:", *(f"{part.__doc__}:" for part in parts)]
    assert [line for line in lines if line.rstrip().endswith("-")] == []
    assert [line for line in lines if len(line) > 80 and "{" not in line and line not in titles] == []


def test_saved_settings_of_another_version_are_refused() -> None:
    saved = parse().to_json()
    saved["model"]["flux_capacitor"] = 1
    with pytest.raises(ValueError, match="flux_capacitor"):
        Config.from_json(saved)


def test_saved_settings_of_retired_flags_are_read() -> None:
    config = parse("--bf16", "--fp8", "--kv-channels", "16")
    saved = config.to_json()
    saved["compilation"]["gemm_algorithms"] = "measured"
    saved["precision"] |= {"fp8_products": "measured", "fp8_margin": 2}
    saved["distributed"]["tp_comm_overlap"] = False
    saved["memory_snapshots"] = {"buddy_snapshots": 5, "buddy_directory": "/dev/shm"}
    saved["model"] |= {"rope_low_freq_factor": None, "rope_original_max_position_embeddings": 8192}
    assert Config.from_json(saved) == config
    saved["model"]["rope_high_freq_factor"] = 2.0
    with pytest.raises(
        ValueError, match=r"configuration: model.rope_high_freq_factor 2.0: not supported: scaling"
    ):
        Config.from_json(saved)


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


@pytest.mark.parametrize(
    ("flags", "compiles", "chosen"),
    [
        ("", False, "apex"),
        ("", True, "torch"),
        ("--decoupled-lr 1", False, "torch"),
        ("--zero-offload-optimizer", False, "torch"),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", False, "torch"),
        ("--optimizer muon", False, "torch"),
    ],
)
def test_auto_takes_apex_only_where_it_can_do_what_is_asked(
    monkeypatch: pytest.MonkeyPatch, flags: str, compiles: bool, chosen: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert resolve_fused_backend(parse(*flags.split()), "cuda", compiles=compiles) == chosen
    if flags:
        with pytest.raises(UsageError, match=r"needs --fused-backend torch$"):
            parse(*flags.split(), "--fused-backend", "apex")
    else:
        assert resolve_fused_backend(parse(), "cpu", compiles=False) == "torch"


def test_groups_are_numbers_or_words_in_python_too() -> None:
    for size, text in ((2, "2"), ("auto", "auto")):
        zero = ZeroConfig(zero_stage=3, zero_hpz_partition_size=size, zero_gradient_partition_size=size)
        assert zero.zero_hpz_partition_size == zero.zero_gradient_partition_size == text
    with pytest.raises(ValueError, match=r"^--zero-hpz-partition-size 2\.5: must be a whole number of "):
        ZeroConfig(zero_stage=3, zero_hpz_partition_size=2.5)


ISLAND = (
    "--outer-interval 5 --islands-at hub:1 --island west --island-names west east --island-secret x".split()
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--outer-interval 10", "--outer-interval 10: needs --islands-at or --outer-alone"),
        ("--outer-alone --outer-overlap 2", "--outer-overlap 2: needs --islands-at"),
        ("--outer-alone --save x --no-save-optim", "--no-save-optim (given): contradicts --outer-alone"),
        ((*ISLAND, "--outer-alone"), "--outer-alone (given): contradicts --islands-at; give one"),
        ("--island west", "--island west: needs --islands-at"),
        ("--islands-at hub", "--islands-at hub: must be HOST:PORT"),
        ("--islands-at hub:70000", "--islands-at hub:70000: must be HOST:PORT"),
        ("--islands-at ::1:29400", "--islands-at ::1:29400: must be HOST:PORT"),
        ("--islands-at hub:29400", "--island-names (not given): give the names of all islands"),
        ((*ISLAND, "--island-names", "west", "west"), "--island-names west west: give the names of all"),
        ((*ISLAND, "--island-names", "west", "a/b"), "--island-names west a/b: 'a/b' may have only letters"),
        ((*ISLAND, "--island", "north"), "--island north: must be one of --island-names west east"),
        (ISLAND[:-2], "--island-secret (not given): give a file"),
        ((*ISLAND, "--outer-overlap", "5"), "--outer-overlap 5: must be below --outer-interval 5"),
        ((*ISLAND, "--outer-lr", "0"), "--outer-lr 0.0: must be above 0"),
        ((*ISLAND, "--outer-momentum", "1"), "--outer-momentum 1.0: must be below 1"),
        ((*ISLAND, "--train-tokens", "64"), "--train-tokens 64: contradicts --islands-at"),
        ((*ISLAND, "--save", "x", "--no-save-optim"), "--no-save-optim (given): contradicts --islands-at"),
    ],
)
def test_an_island_is_refused_what_it_cannot_obey(flags: str | tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(*(flags.split() if isinstance(flags, str) else flags))
    assert str(error.value).startswith(said)
    assert parse(*ISLAND).islands.number == 0


@pytest.mark.parametrize("value", ["[::1]:29600", "10.0.0.1:29600", "hub.example.org:1"])
def test_an_address_is_said_as_it_is_given(value: str) -> None:
    assert joined(*host_and_port("--islands-at", value)) == value


def test_the_secret_of_islands_is_in_a_file_and_in_no_message(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    config = parse(*ISLAND, "--island-secret", str(file))
    with pytest.raises(ValueError, match=r"^--island-secret .*secret: No such file"):
        check_inputs(config, Topology().mesh(), print)
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"^--island-secret .*secret: must hold 16 characters or more"):
        check_inputs(config, Topology().mesh(), print)
    file.write_text("hush" * 4 + "\n")
    assert read_secret("--island-secret", str(file)) == b"hush" * 4
    assert "hush" not in config.to_yaml([])
    assert check_inputs(config, Topology().mesh(), print).schedule.islands == 2
