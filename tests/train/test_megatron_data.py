"""Runs on Megatron-LM's data and in its order: its counts of samples, its batches, any ranks, any resume."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.root import parse_args
from megatron_zpp.config.run import EvaluationConfig, TrainingConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.mesh import Mesh
from megatron_zpp.train.inputs import check_inputs
from megatron_zpp.train.schedule.run_schedule import RunSchedule
from tests.support import logged, pretrain, trained
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import train_here


def requested(training, evaluation):
    batches = BatchSchedule(4, training.global_batch_size, 2, training.rampup_batch_size)
    iterations = training.train_iters or batches.iterations(training.train_samples)
    return RunSchedule(batches, None, iterations).requested_samples(training, evaluation)


@pytest.mark.parametrize(
    ("length", "evaluation", "expected"),
    [
        # train_iters × batch; (train_iters // eval_interval + 1) × eval_iters × batch; eval_iters × batch
        ({"train_iters": 100}, {"eval_iters": 3, "eval_interval": 40}, (1600, (2 + 1) * 3 * 16, 48)),
        ({"train_iters": 80}, {"eval_iters": 3, "eval_interval": 40}, (1280, (2 + 1) * 3 * 16, 48)),
        ({"train_samples": 1605}, {"eval_iters": 1, "eval_interval": 1000}, (1605, 16, 16)),
        ({"train_iters": 5}, {"full_validation": True}, (80, None, None)),
        # 8 samples a step up to 40 consumed, 16 from there on
        (
            {"train_samples": 100, "rampup_batch_size": (8, 8, 40)},
            {"eval_iters": 1, "eval_interval": 1},
            (100, (5 + 3 + 1) * 16, 16),
        ),
        # it counts a step past the end of a run that ends before its ramp
        (
            {"train_samples": 36, "rampup_batch_size": (8, 8, 40)},
            {"eval_iters": 1, "eval_interval": 1},
            (36, (5 + 1) * 16, 16),
        ),
    ],
)
def test_as_many_samples_as_megatron_lm_asks_for(length, evaluation, expected):
    training = TrainingConfig(micro_batch_size=4, global_batch_size=16, **length)
    counts = requested(training, EvaluationConfig(**evaluation))
    assert tuple(counts.values()) == expected


@pytest.fixture
def megatron(corpus: str, tmp_path: Path) -> list[str]:
    """A run in Megatron-LM's order on a blend, several epochs of it."""
    blend = ["--data-path", "0.3", corpus, "0.7", corpus, "--split", "80,10,10", *BYTES, *TINY]
    order = ["--dataset-order", "megatron", "--data-cache-path", str(tmp_path / "cache")]
    return [*blend, "--global-batch-size", "8", "--eval-iters", "0", *order]


def test_any_ranks_and_any_resume_read_the_same(
    megatron: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = ["--train-iters", "4"]

    def losses(name: str, *flags: str) -> list[float]:
        file = tmp_path / name
        train_here([*flags, *length, "--metrics-file", str(file)])
        return logged(file)

    whole = losses("whole", *megatron)
    out = capsys.readouterr().out
    assert "samples of 32 in Megatron-LM's order" in out
    assert " train: the run's 32 samples read 0.0" in out
    on = [*megatron, "--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    losses("parts", *on, "--exit-interval", "2")
    assert losses("parts", *on) == whole
    assert "WARNING" not in capsys.readouterr().out
    trained(*megatron, *length, "--metrics-file", str(tmp_path / "two"), processes=2)
    assert logged(tmp_path / "two") == pytest.approx(whole, rel=1e-5)
    assert losses("windows", *megatron[: megatron.index("--dataset-order")])[0] != whole[0]


def test_another_length_is_said_at_a_resume_and_other_weights_are_refused(
    megatron: list[str], corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ["--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints")]
    train_here([*megatron, *save, "--train-iters", "4", "--exit-interval", "2"])
    train_here([*megatron, *save, "--train-iters", "5", "--exit-interval", "4"])
    said = " WARNING: the run was to read 32 samples and is to read 40, on which the order"
    assert said in capsys.readouterr().out
    megatron[megatron.index("0.3")] = "0.5"
    said = f"--data-path 0.5 {corpus} 0.7 {corpus}: the run began with 0.3 {corpus} 0.7 {corpus}, and"
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        train_here([*megatron, *save, "--train-iters", "5"])


def test_refusals(megatron: list[str]) -> None:
    unweighted = [entry for entry in megatron if entry not in ("0.3", "0.7")]
    mock = ["--mock-data", "--dataset-order", "megatron", *BYTES, *TINY]
    for flags, said in (
        ([*megatron, "--seed", str(2**32)], f"--seed {2**32}: must be below {2**32}"),
        ([*megatron, "--full-validation"], "--full-validation (given): --data-path has weights"),
        (mock, "--dataset-order megatron: --mock-data has no documents to order"),
        ([*unweighted, "--train-iters", "100000"], "the run requests 800000 train samples, but one epoch of"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            check_inputs(parse_args(["--train-iters", "2", *flags]), Mesh(), print)


def test_a_plan_leaves_no_order_behind_and_reads_one_that_is_there(megatron: list[str]) -> None:
    cache, said = Path(megatron[-1]), list[str]()
    run = [*megatron, "--train-iters", "2"]
    plan = parse_args([*run, "--dry-run"])
    planned = check_inputs(plan, Mesh(), said.append).splits.train
    assert not cache.exists()
    assert said[0].endswith(" samples")  # not where it is kept
    kept = check_inputs(parse_args(run), Mesh(), print).splits.train
    assert (planned.batch(np.arange(16)) == kept.batch(np.arange(16))).all()
    before = sorted(cache.rglob("*"))
    check_inputs(plan, Mesh(), pytest.fail)
    assert sorted(cache.rglob("*")) == before
    shutil.rmtree(cache)
    cache.write_text("")
    with pytest.raises(ValueError, match=f"^--data-cache-path {cache}: "):
        check_inputs(plan, Mesh(), print)


def test_a_cache_that_our_own_order_does_not_need_is_said(flags: list[str], tmp_path: Path) -> None:
    done = pretrain(*flags, "--train-iters", "1", "--data-cache-path", str(tmp_path / "cache"))
    assert done.returncode == 0
    assert f"warning: --data-cache-path {tmp_path}/cache: no effect: --dataset-order windows" in done.stderr
    assert not (tmp_path / "cache").exists()
