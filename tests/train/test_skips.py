"""Skipped steps: what they leave of the schedule, and how the log counts them."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.zero.engine import ZeroEngine
from tests.train.in_process import Resumed, of

FP16 = "--fp16 --initial-loss-scale 131072 --hysteresis 1 --loss-scale-window 2 --lr-warmup-iters 4".split()


def test_a_skipped_step_does_not_advance_the_learning_rate(corpus: str, tmp_path: Path) -> None:
    """Megatron-LM's scheduler steps only when the optimizer did; iterations and samples always count."""
    flags = [*FP16, "--global-batch-size", "2", "--train-iters", "24", "--lr-decay-style", "constant"]
    run = Resumed(corpus, tmp_path / "whole")
    records = run(*flags)
    skipped, rates, taken = of(records, "skipped"), of(records, "learning_rate"), 0
    assert 0 < sum(skipped[:4]) < 4
    assert sum(skipped[4:])  # the scale rises again until it is too high
    scales = of(records, "loss_scale")
    halved = [after / before == 0.5 for before, after in pairwise(scales)]
    assert halved == [bool(step) for step in skipped[:-1]]
    for step, rate in zip(skipped, rates, strict=True):
        assert rate == pytest.approx(3e-3 * min(1, taken / 4))
        taken += 1 - step
    assert of(records, "consumed_samples") == list(range(2, 50, 2))
    assert of(records, "nan") == [0] * 24
    assert run.newest()["skipped_iterations"] == sum(skipped)
    assert run.newest()["skipped_samples"] == 2 * sum(skipped)

    parts = Resumed(corpus, tmp_path / "parts")
    for stop in (1, 3, 24):
        records = parts(*flags, "--exit-interval", str(stop))
    assert of(records, "skipped") == skipped
    assert of(records, "learning_rate") == rates


def test_a_schedule_in_samples_leaves_out_those_of_skipped_steps(corpus: str, tmp_path: Path) -> None:
    flags = [*FP16[:-2], "--global-batch-size", "2", "--train-samples", "16"]
    records, trained = Resumed(corpus, tmp_path)(*flags), 0
    assert sum(of(records, "skipped"))
    for record in records:
        assert record["learning_rate"] == pytest.approx(3e-3 * (16 - trained) / 16)
        trained += 0 if record["skipped"] else 2


@pytest.mark.parametrize("flags", ["--fp32", "--fp16", "--fp32 --optimizer-in-backward"])
def test_nan_iterations_are_those_whose_loss_is_not_finite(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """With any loss scale. A non-finite gradient also skips its step, and is not a nan iteration."""
    healthy, seen = ZeroEngine._loss, []

    def poisoned(engine: ZeroEngine, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        loss = healthy(engine, tokens)
        if len(seen) == 2:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss + {3: torch.nan, 4: torch.inf}.get(len(seen), 0.0)

    monkeypatch.setattr(ZeroEngine, "_loss", poisoned)
    records = Resumed(corpus, tmp_path)(*flags.split(), "--train-iters", "5", "--initial-loss-scale", "1024")
    assert of(records, "skipped") == [0, 1, 1, 1, 0]
    assert of(records, "nan") == [0, 0, 1, 1, 0]
    assert [record["grad_norm"] is None for record in records] == [False, True, True, True, False]


def test_checkpoints_of_older_versions_count_no_skipped_steps() -> None:
    old = {"iteration": 5, "consumed_samples": 50, "run": "", "standing": None}
    assert Progress.from_json(old) == Progress(iteration=5, consumed_samples=50)
