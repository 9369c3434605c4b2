"""Schedules against their definitions and against torch's own schedulers."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_zpp.config.optimizer import LearningRateConfig
from megatron_zpp.train.schedule.learning_rate import LearningRate

PEAK, FLOOR = 1e-3, 1e-5


def schedule(samples: int = 1000, samples_per_iteration: int = 10, **settings: object) -> LearningRate:
    config = LearningRateConfig(**{"lr": PEAK, "min_lr": FLOOR, **settings})
    return LearningRate.from_config(config, samples=samples, samples_per_iteration=samples_per_iteration)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_equals_torchs(style: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=PEAK)
    if style == "linear":
        theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, FLOOR / PEAK, total_iters=100)
    else:
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=FLOOR)
    ours = schedule(lr_decay_style=style)
    for iteration in range(101):
        assert ours(10 * iteration) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_warm_up_starts_at_its_floor_and_reaches_the_peak() -> None:
    ours = schedule(lr_warmup_iters=20, lr_warmup_init=1e-4, lr_decay_style="cosine")
    assert ours(0) == 1e-4
    assert ours(100) == pytest.approx(1e-4 + (PEAK - 1e-4) / 2)
    assert ours(200) == PEAK
    assert ours(1000) == pytest.approx(FLOOR)


@pytest.mark.parametrize("told", [{"lr_warmup_fraction": 0.2}, {"lr_warmup_samples": 200}])
def test_warm_up_can_be_told_as_fraction_or_samples(told: dict[str, float]) -> None:
    by_iterations = schedule(lr_warmup_iters=20)
    assert [schedule(**told)(c) for c in range(0, 1001, 50)] == [by_iterations(c) for c in range(0, 1001, 50)]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_never_above_peak_nor_below_floor_and_never_rising_after_warm_up(style: str) -> None:
    extra = {"lr_wsd_decay_iters": 30} if style == "WSD" else {}
    ours = schedule(lr_decay_style=style, lr_warmup_iters=10, **extra)
    rates = [ours(consumed) for consumed in range(100, 1500, 7)]
    assert all(FLOOR <= rate <= PEAK for rate in rates)
    assert all(later <= earlier for earlier, later in pairwise(rates))


def test_inverse_square_root_quarters_when_samples_grow_sixteenfold() -> None:
    ours = schedule(lr_decay_style="inverse-square-root", lr_warmup_samples=50)
    assert ours(800) == pytest.approx(PEAK / 4)
    assert ours(1000) > FLOOR
    assert ours(1001) == FLOOR  # past the end of the decay, as Megatron-LM's


@pytest.mark.parametrize(
    ("shape", "halfway"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * math.sqrt(0.5) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_holds_the_peak_and_then_decays(shape: str, halfway: float) -> None:
    ours = schedule(lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style=shape)
    assert ours(800) == PEAK
    assert ours(900) == pytest.approx(FLOOR + halfway * (PEAK - FLOOR))
    assert ours(1000) == pytest.approx(FLOOR)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"lr_warmup_iters": 100}, "--lr-warmup-iters 100"),
        ({"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0"),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 101}, "--lr-warmup-iters 101"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10},
            "--lr-wsd-decay-iters 95",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        schedule(**settings)


def test_a_run_may_end_within_its_warm_up_to_a_constant_rate() -> None:
    assert schedule(lr_decay_style="constant", lr_warmup_iters=200)(1000) == PEAK / 2


def test_a_fraction_of_the_decay_is_not_cut_to_whole_samples() -> None:
    """A thousandth of 1,000 samples and a half; Megatron-LM divides by 1.5 here."""
    warm = schedule(lr_warmup_fraction=0.0015)
    assert warm.warmup == 1.5
    assert warm(1) == pytest.approx(warm.peak / 1.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"style": "cos"}, "style cos: must be constant, linear, cosine, inverse-square-root or WSD"),
        ({"style": "minus_sqrt"}, "style minus_sqrt: must be constant, "),
        ({"style": "WSD", "wsd_style": "sqrt"}, "wsd_style sqrt: must be exponential, "),
        ({"warmup": 100}, "warmup 100: must end before the decay does, at 100"),
        ({"style": "WSD", "warmup": 50, "wsd_decay": 51}, "wsd_decay 51: must fit .*, into 50"),
    ],
)
def test_a_schedule_of_ones_own_is_refused_before_its_first_step(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        LearningRate(peak=1e-3, decay=100, **given)
