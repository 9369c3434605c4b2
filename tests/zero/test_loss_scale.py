"""The dynamic loss scale's promises."""

import pytest
import torch

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.zero.loss_scale import LossScale


def of(**settings: object) -> LossScale:
    return LossScale(PrecisionConfig(**settings), torch.device("cpu"))


def scales(scale: LossScale, *overflows: float) -> list[float]:
    """The scale after each step."""
    seen = []
    for overflow in overflows:
        scale.update(torch.tensor(float(overflow)))
        seen.append(scale.scale.item())
    return seen


@pytest.mark.parametrize(
    ("settings", "overflows", "expected"),
    [
        ({"bf16": True}, [1, 0], [1, 1]),
        ({"loss_scale": 1024.0}, [1, 1, 0], [1024] * 3),
        ({"min_loss_scale": 4.0, "hysteresis": 2}, [1] * 5, [16, 8, 4, 4, 4]),
        ({"loss_scale_window": 3, "hysteresis": 1}, [0, 0, 1, 0, 0, 0], [16, 16, 8, 8, 8, 16]),
        ({"loss_scale_window": 2, "hysteresis": 2}, [1, 0, 0, 1, 1], [16, 16, 32, 32, 16]),
    ],
    ids=["without fp16", "fixed", "halved to the minimum", "doubled after a window", "patience renewed"],
)
def test_the_scale_after_each_step(settings: dict, overflows: list[int], expected: list[float]) -> None:
    scale = of(**{"fp16": "bf16" not in settings, "initial_loss_scale": 16.0} | settings)
    assert scales(scale, *overflows) == expected


@pytest.mark.parametrize("before", [(1,), (1, 1, 1, 0, 0)])
def test_a_resumed_scale_goes_on_as_one_that_was_not_saved(before: tuple[int, ...]) -> None:
    """Its patience is as much used, and its window as long."""
    first, second = (of(fp16=True, initial_loss_scale=start, loss_scale_window=5) for start in (64.0, 2.0))
    scales(first, *before)
    second.load_state(first.state())
    later = (1, 0, 0, 0, 1, 1)
    assert scales(first, *later) == scales(second, *later)


def test_a_dynamic_scale_starts_at_its_initial_value_after_a_run_without_one() -> None:
    scale = of(fp16=True, initial_loss_scale=2.0**16)
    scale.load_state(of(bf16=True).state())
    assert scale.scale == 2.0**16
