"""The dynamic loss scale's promises."""

import torch

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.zero.loss_scale import LossScale
from tests.zero.engines import engine_of, model_of


def of(**settings: object) -> LossScale:
    return LossScale(PrecisionConfig(**settings), torch.device("cpu"))


def scales(scale: LossScale, *overflows: bool) -> list[float]:
    """The scale after each step."""
    seen = []
    for overflow in overflows:
        scale.update(torch.tensor(float(overflow)))
        seen.append(scale.scale.item())
    return seen


def test_without_fp16_there_is_no_loss_scale() -> None:
    assert scales(of(bf16=True), True, False) == [1.0, 1.0]


def test_a_fixed_scale_never_changes() -> None:
    assert scales(of(fp16=True, loss_scale=1024.0), True, True, False) == [1024.0] * 3


def test_the_scale_halves_after_its_patience_but_not_below_the_minimum() -> None:
    scale = of(fp16=True, initial_loss_scale=16.0, min_loss_scale=4.0, hysteresis=2)
    assert scales(scale, True, True, True, True, True) == [16.0, 8.0, 4.0, 4.0, 4.0]


def test_the_scale_doubles_after_a_window_of_clean_steps() -> None:
    scale = of(fp16=True, initial_loss_scale=16.0, loss_scale_window=3, hysteresis=1)
    assert scales(scale, False, False, True, False, False, False) == [16.0, 16.0, 8.0, 8.0, 8.0, 16.0]


def test_a_clean_window_renews_the_patience() -> None:
    scale = of(fp16=True, initial_loss_scale=16.0, loss_scale_window=2, hysteresis=2)
    assert scales(scale, True, False, False, True, True) == [16.0, 16.0, 32.0, 32.0, 16.0]


def test_state_round_trips() -> None:
    first = of(fp16=True, initial_loss_scale=64.0, loss_scale_window=5)
    scales(first, True, True, True, False, False)
    second = of(fp16=True, loss_scale_window=5)
    second.load_state(first.state())
    later = (False, False, False, True, True)
    assert scales(first, *later) == scales(second, *later)


def test_a_resumed_scale_has_used_its_patience() -> None:
    first, second = (of(fp16=True, initial_loss_scale=64.0, hysteresis=2) for _ in range(2))
    assert scales(first, True)[-1] == 64.0
    second.load_state(first.state())
    assert scales(second, True)[-1] == 32.0


def test_a_dynamic_scale_starts_at_its_initial_value_after_a_run_without_one() -> None:
    state = LossScale(PrecisionConfig(bf16=True), torch.device("cpu")).state()
    scale = LossScale(PrecisionConfig(fp16=True, initial_loss_scale=2.0**16), torch.device("cpu"))
    scale.load_state(state)
    assert scale.scale == 2.0**16


def test_an_engine_halves_its_scale_while_steps_overflow_and_doubles_it_behind_a_window() -> None:
    fp16 = PrecisionConfig(fp16=True, initial_loss_scale=2.0**30, hysteresis=1, loss_scale_window=2)
    engine, tokens = engine_of(model_of(), 250, precision=fp16), torch.randint(250, (2, 17))

    def step() -> tuple[bool, float, float]:
        """Whether it is skipped, the scale that it has, and the next one."""
        engine.accumulate(tokens, index=0, micro_batches=1)
        result = engine.step(1e-4)
        return bool(result.skipped), result.loss_scale.item(), engine.loss_scale.scale.item()

    skipped, scale, following = step()
    assert (skipped, scale) == (True, 2.0**30)
    while skipped:
        assert following == scale / 2
        skipped, scale, following = step()
    assert following == scale > 2.0**8
    assert step() == (False, scale, 2 * scale)
