"""What the log of a resumed run says about flags that differ from those of the run that saved."""

from pathlib import Path

import pytest

from megatron_zpp.config.root import parse_args
from megatron_zpp.train.resume.changes import (
    numbering_changes,
    residual_changes,
    row_scaling_changes,
    setting_changes,
)
from megatron_zpp.zero.model_states import SUM_RESIDUAL, residual_of
from tests.config.command_line import MINIMAL
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, Resumed, of, train_here


def test_changed_flags_and_a_jump_of_the_learning_rate_are_said(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = Resumed(corpus, tmp_path)
    resume("--train-iters", "4")
    capsys.readouterr()
    others = "--hidden-dropout 0 --zero-stage 2 --optimizer-in-backward".split()
    records = resume("--train-iters", "8", "--clip-grad", "5", *others)
    said = capsys.readouterr().out
    changed = "--hidden-dropout 0.1 → 0.0, --train-iters 4 → 8, --clip-grad 1.0 → 5.0, "
    changed += "--optimizer-in-backward not given → given, --zero-stage 0 → 2"
    assert "optimizer: " not in said
    assert " units step in the backward, clipped to 5 by the last step's norm, or that" in said
    assert f" changed since the checkpoint: {changed}\n" in said
    assert " WARNING: the learning rate of the next step was 0.000e+00 and is 1.500e-03\n" in said
    assert of(records, "learning_rate")[4] == pytest.approx(1.5e-3)


def test_the_head_names_what_is_not_adamw_on_fp32_states() -> None:
    def said(*argv: str) -> str:
        return parse_args([*MINIMAL, *argv]).optimizer.describe()

    compact = "--use-precision-aware-optimizer --exp-avg-dtype bf16".split()
    assert said() == ""
    assert said(*compact) == "master weights in fp32, moments in bf16 and fp32"
    assert said("--optimizer", "muon", *compact).startswith("Muon for layers' matrices")


def test_samples_that_are_packed_now_are_numbered_otherwise() -> None:
    """By a run that resumes from a checkpoint which is older than packing."""
    present = parse_args(MINIMAL).to_json()
    saved = present | {"data": {k: v for k, v in present["data"].items() if k != "dataset_packing"}}
    assert numbering_changes(saved, present) == []
    now = present | {"data": present["data"] | {"dataset_packing": "best-fit"}}
    (line,) = numbering_changes(saved, now)
    assert line.startswith(" WARNING: --dataset-packing was concatenation and is best-fit: from here on the")


def test_retired_settings_are_said_where_something_else_happens_now() -> None:
    present = parse_args([*MINIMAL, "--zero-stage", "3", "--zero-quantized-weights"]).to_json()
    old = present["zero"] | {"zero_hpz_secondary": "bf16", "zero_delta4_iterations": None}
    assert setting_changes(present | {"zero": old}, 2, present, 2) == []
    old |= {"zero_quantized_weights_format": "fp8", "zero_hpz_secondary": "quantized"}
    saved = present | {"zero": old, "compilation": {"gemm_algorithms": "measured"}}
    (line,) = setting_changes(saved, 2, present, 2)
    assert line == (
        " changed since the checkpoint: --gemm-algorithms measured → retired, "
        "--zero-quantized-weights-format fp8 → int8, --zero-hpz-secondary quantized → retired"
    )


def test_flags_that_an_older_version_did_not_have_were_not_given() -> None:
    """As masks, an outer optimizer, and the format of matmuls."""
    flags = ["--eod-mask-loss", "--outer-alone", "--fp8"]
    (line,) = setting_changes({}, 2, parse_args([*MINIMAL, "--bf16", *flags]).to_json(), 2)
    changed = ", ".join(f"{flag} not given → given" for flag in flags)
    assert line == f" changed since the checkpoint: {changed}"


def test_a_run_without_its_moments_says_that_the_schedule_goes_on(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Megatron-LM it starts again, so a user of its flag may expect a warm-up."""
    resume, line = Resumed(corpus, tmp_path), " --no-load-optim: the learning rate continues its schedule"
    steps = ["--train-iters", "4", "--lr-warmup-iters", "2"]
    resume(*steps, "--exit-interval", "1", "--no-save-optim")
    resume(*steps, "--exit-interval", "3", "--no-load-optim")
    said = capsys.readouterr().out
    assert said.count(line) == 1
    assert "--finetune restarts schedule and iteration\n" in said
    records = resume(*steps)
    said = capsys.readouterr().out
    assert not any(each in said for each in (line, "changed", "WARNING"))
    assert of(records, "learning_rate") == pytest.approx([0.0, 1.5e-3, 3e-3, 1.5e-3])


def test_what_codes_have_lost_of_gradients_is_sent_summed_or_dropped() -> None:
    two, four = (["weights", *map(residual_of, range(nodes)), SUM_RESIDUAL] for nodes in (2, 4))
    assert residual_changes(two, two) == residual_changes(["weights"], two) == []
    assert "is summed" in residual_changes(two, four)[0]
    assert "is dropped" in residual_changes(two, ["weights"])[0]


def test_moments_of_rows_begin_at_zero_or_are_dropped() -> None:
    without, with_them = ({"optimizer": each} for each in ({}, {"muon_row_scaling_beta2": 0.95}))
    assert row_scaling_changes(without, without) == row_scaling_changes(with_them, with_them) == []
    assert "begin at zero" in row_scaling_changes(without, with_them)[0]
    assert "are dropped" in row_scaling_changes(with_them, without)[0]


LLAMA = "--position-embedding-type rope --rotary-base 500 --window-size 7,0 --normalization RMSNorm"
MEANING = "the weights are those of another model"


def test_flags_that_change_no_shape_are_named_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = str(tmp_path / "save")
    shape = ["--mock-data", *BYTES, *TINY, *SMALLEST]
    train_here([*shape, *LLAMA.split(), "--save", save, "--train-iters", "2", "--exit-interval", "1"])

    def warnings(*flags: str) -> list[str]:
        capsys.readouterr()
        train_here([*shape, *flags, "--load", save, "--train-iters", "2"])
        lines = capsys.readouterr().out.splitlines()
        return [line.removeprefix(" WARNING: ") for line in lines if "WARNING" in line]

    of_the_run = "--init-method-std 0.1 --max-position-embeddings 64 --attention-dropout 0"
    assert warnings(*LLAMA.split(), *of_the_run.split()) == []
    forgotten = "--position-embedding-type none --normalization RMSNorm --num-attention-heads 4".split()
    expected = [
        f"--num-attention-heads was 1 and is 4: {MEANING}",
        f"--kv-channels was 16 and is 4: {MEANING}",
        f"--num-query-groups was 1 and is 4: {MEANING}",
        f"--window-size was 7,0 and is not given: {MEANING}",
        f"--position-embedding-type was rope and is none: {MEANING}",
        f"--rotary-base was 500.0 and is not given: {MEANING}",
        f"--rotary-percent was 1.0 and is not given: {MEANING}",
        f"--squared-relu was not given and is given: {MEANING}",
    ]
    assert sorted(warnings(*forgotten, "--squared-relu")) == sorted(expected)
    longer = LLAMA.replace("500", "9000").split()
    assert warnings(*longer, "--finetune") == [f"--rotary-base was 500.0 and is 9000.0: {MEANING}"]
