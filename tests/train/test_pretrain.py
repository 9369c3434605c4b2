"""Whole runs: what they report, that they resume to the same bits, and how flags shape them."""

import json
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.train.steps.stopping import STOPPED, Stop, StopConditions
from tests.support import logged, nightly, records_of, run, trained
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, Resumed, of, train_here

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")

MEGATRON_LINE = re.compile(  # what scripts that read Megatron-LM's logs look for
    r" \[[\d\- :]+\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): ([\d.]+) \| throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \| "
    r"learning rate: ([\d.E+-]+) \| global batch size: +(\d+) \| lm loss: ([\d.E+-]+) \| "
    r"loss scale: ([\d.]+) \| grad norm: ([\d.]+) \| number of skipped iterations: +(\d+) \| "
    r"number of nan iterations: +(\d+) \|"
)


def test_a_run_learns_and_reports_everywhere(flags: list[str], corpus: str, tmp_path: Path) -> None:
    """One run with every sink: it predicts better than byte frequencies, and each sink has the curve."""
    flags += ["--train-iters", "60", "--lr-decay-style", "cosine", "--eval-interval", "30", "--lr", "2e-2"]
    flags += ["--eval-iters", "5", "--sample-prompt", "32 100", *NO_DROPOUT]
    flags += "--micro-batch-size 16 --num-layers 1 --position-embedding-type rope".split()
    flags += ["--metrics-file", str(tmp_path / "metrics.jsonl"), "--tensorboard-dir", str(tmp_path / "tb")]
    flags += ["--wandb-project", "megatron_zpp", "--wandb-exp-name", "tiny"]
    out = trained(*flags, "--wandb-save-dir", str(tmp_path / "wandb"), WANDB_MODE="offline")
    lines = [match for line in out.splitlines() if (match := MEGATRON_LINE.match(line))]
    assert [int(line[1]) for line in lines] == list(range(1, 61))
    assert {line[2] for line in lines} == {"60"}
    assert "tokens/s: " in out
    assert "MFU: " in out
    assert " 1 layer × 64, 4 heads, sequence 32, vocabulary 257 padded to " in out

    losses = logged(tmp_path / "metrics.jsonl")
    assert losses[0] == pytest.approx(math.log(257), rel=0.05)
    assert losses == pytest.approx([float(line[8]) for line in lines], rel=1e-5)
    valid = logged(tmp_path / "metrics.jsonl", "valid_loss")
    assert len(valid) == 3  # at the start, in the middle, at the end
    shares = np.bincount(IndexedDataset(corpus).tokens) / IndexedDataset(corpus).num_tokens
    assert valid[-1] < -sum(share * math.log(share) for share in shares if share)
    assert logged(tmp_path / "metrics.jsonl", "valid_perplexity")[-1] == pytest.approx(math.exp(valid[-1]))
    assert len(logged(tmp_path / "metrics.jsonl", "test_loss")) == 1
    line = r"^ validation loss at (.*?) \| lm loss value: ([\d.E+-]+) \| lm loss PPL: [\d.E+-]+ \|$"
    evaluated = re.findall(line, out, re.MULTILINE)
    places = ["iteration 0", "iteration 30", "iteration 60", "iteration 60 on test set"]
    assert [where for where, _ in evaluated] == places
    assert [float(loss) for _, loss in evaluated[:3]] == pytest.approx(valid, rel=1e-6)
    first = next(record for record in records_of(tmp_path / "metrics.jsonl") if "lm_loss" in record)
    promised = "iteration consumed_samples lm_loss grad_norm learning_rate loss_scale skipped elapsed_ms"
    promised += " tokens_per_second tflops_per_gpu mfu memory_allocated_bytes memory_peak_bytes"
    promised += " intra_node_bytes inter_node_bytes"
    assert set(promised.split()) <= set(first)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.value for event in events.Scalars("lm loss")] == pytest.approx(losses, rel=1e-6)
    assert len(events.Scalars("lm loss validation")) == 3
    texts = logged(tmp_path / "metrics.jsonl", "sample")
    assert all(re.fullmatch(r"32 100( \d+){0,64}", text) for text in texts)
    assert len(texts) == 3
    assert all(f"| {text!r} |" in out for text in texts)
    assert len(events.Tensors("sample/text_summary")) == 3
    (recorded,) = (tmp_path / "wandb").rglob("*.wandb")
    assert recorded.stat().st_size > 0


def test_the_first_step_is_reported_long_before_the_first_log_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train_here([*flags, "--train-iters", "2", "--log-interval", "2", "--eval-iters", "0"])
    first, second = (line for line in capsys.readouterr().out.splitlines() if "iteration " in line)
    assert re.fullmatch(r" first step, iteration 1: loss \d+\.\d{4}, \d+\.\d s", first)
    assert MEGATRON_LINE.match(second)


def test_every_step_is_in_a_record(corpus: str, tmp_path: Path) -> None:
    """Also those before a stop and before the end that are no multiple of --log-interval."""
    steps = of(Resumed(corpus, tmp_path / "steps")("--train-iters", "7"), "lm_loss")
    resume = Resumed(corpus, tmp_path)
    for more in (["--exit-interval", "5"], []):
        records = resume("--train-iters", "7", "--log-interval", "3", *more)
    assert of(records, "iteration") == [3, 5, 6, 7]
    means = [sum(steps[:3]) / 3, sum(steps[3:5]) / 2, *steps[5:]]
    assert of(records, "lm_loss") == pytest.approx(means, rel=1e-12)


def test_an_exit_interval_that_divides_the_run_leaves_the_final_evaluations(flags: list[str]) -> None:
    ending = train_here([*flags, "--train-iters", "4", "--exit-interval", "2"])
    assert ending.iteration == 2
    ending = train_here([*flags, "--train-iters", "2", "--exit-interval", "2"])
    assert ending.stop is None


def test_a_run_keeps_its_name_where_it_saves(corpus: str, tmp_path: Path) -> None:
    """W&B's curves go on in the run of that name; a run that saves elsewhere has another."""
    resume, names = Resumed(corpus, tmp_path), []
    for more in (["--exit-interval", "1"], ["--exit-interval", "2"], ["--save", str(tmp_path / "other")]):
        resume("--train-iters", "3", *more)
        saved = (tmp_path / ("other" if "--save" in more else "checkpoints")).glob("iter_*/state.json")
        names.append(json.loads(max(saved).read_text())["progress"]["run"])
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("precision", [nightly("--bf16"), "--fp16"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    """Bit for bit, with dropout, accumulation and (fp16) a moving loss scale."""
    flags = [*flags, precision, "--global-batch-size", "8", "--train-iters", "6"]
    if precision == "--fp16":
        flags += ["--initial-loss-scale", "65536", "--loss-scale-window", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_here([*flags, "--save", str(whole), "--metrics-file", str(tmp_path / "whole.jsonl")])
    flags += ["--save", str(parts), "--load", str(parts), "--metrics-file", str(tmp_path / "parts.jsonl")]
    said = []
    for more in (["--exit-interval", "3"], [], []):
        capsys.readouterr()
        train_here([*flags, *more])
        said.append(capsys.readouterr().out)
    assert "starting from initial weights" in said[0]
    assert "resuming at iteration 3, 24 samples" in said[1]
    assert "the run is complete: iteration 6 of 6" in said[2]
    for name in ("lm_loss", "loss_scale"):
        assert logged(tmp_path / "whole.jsonl", name) == logged(tmp_path / "parts.jsonl", name)
    newest = "iter_0000006/rank_00000.safetensors"
    assert (whole / newest).read_bytes() == (parts / newest).read_bytes()


def test_every_step_drops_out_something_else(tmp_path: Path) -> None:
    """Where all tokens are one, and updates are far below the weights' rounding, nothing else differs."""
    with IndexedDatasetWriter(str(tmp_path / "ones"), np.dtype(np.uint16)) as writer:
        writer.add_document(np.ones(1000, np.uint16))
    argv = ["--data-path", str(tmp_path / "ones"), "--split", "100,0,0", *BYTES, *TINY, *SMALLEST]
    argv += ["--train-iters", "4", "--lr", "1e-30"]
    train_here([*argv, "--metrics-file", str(tmp_path / "dropout")])
    train_here([*argv, *NO_DROPOUT, "--metrics-file", str(tmp_path / "none")])
    assert len(set(logged(tmp_path / "dropout"))) == 4
    assert len(set(logged(tmp_path / "none"))) == 1


def test_full_validation_reads_each_window_once(flags: list[str], tmp_path: Path) -> None:
    """The same loss for any micro-batch size, which need not divide the number of windows."""
    flags += ["--full-validation", "--global-batch-size", "5", "--split", "98,1,1", "--train-iters", "1"]
    losses = []
    for size in ("1", "5"):
        path = tmp_path / f"{size}.jsonl"
        train_here([*flags, "--micro-batch-size", size, "--metrics-file", str(path)])
        losses.append(logged(path, "valid_loss")[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_time_limit_saves_and_exits(flags: list[str], tmp_path: Path) -> None:
    limit = ["--train-iters", "100000", "--exit-duration-in-mins", "0.01"]
    ending = train_here([*flags, *limit, "--save", str(tmp_path)])
    assert (ending.stop.status, str(ending.stop)) == (0, "--exit-duration-in-mins 0.01")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == f"{ending.iteration}\n"


@pytest.mark.nightly
def test_a_time_limit_counts_from_the_start_of_the_process(flags: list[str]) -> None:
    """Not from the first step: what a scheduler grants includes the imports, the loading and the building."""
    command = ["-m", "megatron_zpp", "train", *flags, "--eval-iters", "0"]  # with all imports
    began = time.monotonic()
    assert run(*command, "--train-iters", "1").returncode == 0
    minutes = (time.monotonic() - began) / 60 / 4
    done = run(*command, "--train-iters", "100000", "--exit-duration-in-mins", str(minutes))
    assert re.search(r"exiting at iteration [12]: --exit-duration-in-mins", done.stdout), done.stderr[-2000:]
    assert done.returncode == 0


def test_finetuning_takes_weights_and_starts_over(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, file = str(tmp_path / "checkpoints"), tmp_path / "m.jsonl"
    flags = [*flags, "--metrics-file", str(file)]
    train_here([*flags, "--train-iters", "4", "--save", save, "--save-interval", "2"])
    before = logged(file, "valid_loss")
    train_here([*flags, "--train-iters", "1", "--load", save, "--finetune"])
    assert "starting at iteration 0" in capsys.readouterr().out
    assert logged(file, "valid_loss")[len(before)] == pytest.approx(before[-1], rel=1e-6)
    train_here([*flags, "--train-iters", "3", "--load", save, "--ckpt-step", "2"])
    assert "resuming at iteration 2" in capsys.readouterr().out


class Heard(Activity):
    """Every mark by its words: whether it may take unlimited time."""

    def __init__(self) -> None:
        super().__init__()
        self.patient: dict[str, bool] = {}

    def now(self, text: str, *, patient: bool = False, limit: float | None = None) -> None:
        super().now(text, patient=patient, limit=limit)
        self.patient[text] = patient


def test_the_first_evaluation_of_a_resumed_run_may_build_its_kernels(
    flags: list[str], tmp_path: Path
) -> None:
    """The compiler builds the graph without gradients then, after quick steps."""
    saved = ["--save", str(tmp_path), "--load", str(tmp_path), "--eval-iters", "8"]
    run = [*flags, *saved, "--train-iters", "4", "--eval-interval", "2"]
    train_here([*run, "--exit-interval", "1"])
    train_here(run, heard := Heard())
    marks = heard.patient
    parts = ["reading micro-batch 1 of 1", "micro-batch 1 of 1", "optimizer", "report"]
    assert [marks[f"step 4, {part}"] for part in parts] == [False] * 4
    assert not marks["step 3, micro-batch 1 of 1"]
    assert marks["evaluation of valid at iteration 2, round 1 of 8"]
    assert not marks["evaluation of valid at iteration 2, round 2 of 8"]
    assert not marks["evaluation of valid at iteration 4, round 1 of 8"]


def test_the_next_start_makes_an_evaluation_that_a_stop_abandoned(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, rounds = tmp_path / "metrics.jsonl", []

    def stop_in_the_third(_: StopConditions) -> None:
        rounds.append(1)
        if len(rounds) == 3:  # of two for each evaluation
            raise Stop(STOPPED, "SIGTERM")

    monkeypatch.setattr(StopConditions, "between_rounds", stop_in_the_third)
    saved = ["--save", str(tmp_path), "--load", str(tmp_path), "--metrics-file", str(metrics)]
    for reached in (2, 4):
        ending = train_here([*flags, *saved, "--train-iters", "4", "--eval-interval", "2"])
        assert ending.iteration == reached
    records = records_of(metrics)
    assert [record["iteration"] for record in records if "valid_loss" in record] == [0, 2, 4]
