"""The dynamic loss scale's promises."""

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.zero.loss_scale import LossScale


def dynamic(**settings: object) -> LossScale:
    return LossScale.from_config(PrecisionConfig(fp16=True, **settings))


def test_without_fp16_there_is_none() -> None:
    scale = LossScale.from_config(PrecisionConfig(bf16=True))
    scale.update(overflow=True)
    assert scale.scale == 1.0


def test_a_fixed_scale_stays() -> None:
    scale = dynamic(loss_scale=1024.0)
    for overflow in (True, True, False):
        scale.update(overflow)
    assert scale.scale == 1024.0


def test_halves_after_its_patience_and_not_below_the_minimum() -> None:
    scale = dynamic(initial_loss_scale=16.0, min_loss_scale=4.0, hysteresis=2)
    seen = []
    for _ in range(5):
        scale.update(overflow=True)
        seen.append(scale.scale)
    assert seen == [16.0, 8.0, 4.0, 4.0, 4.0]


def test_doubles_after_a_window_of_clean_steps_in_a_row() -> None:
    scale = dynamic(initial_loss_scale=16.0, loss_scale_window=3, hysteresis=1)
    for overflow in (False, False, True, False, False, False):
        scale.update(overflow)
    assert scale.scale == 16.0  # halved by the overflow, doubled by the three after it


def test_state_round_trips() -> None:
    scale = dynamic(initial_loss_scale=64.0, loss_scale_window=5)
    for overflow in (True, True, True, False, False):
        scale.update(overflow)
    other = dynamic(loss_scale_window=5)
    other.load_state(scale.state())
    for overflow in (False, False, False, True, True):
        scale.update(overflow)
        other.update(overflow)
        assert scale == other
