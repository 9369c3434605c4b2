"""Delayed scaling: every code by an oracle, the scales' rule, and what a NaN does and does not do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.model.fp8.cast import FORMATS, GRADIENT, INPUT, LARGEST, back, factors_of, plain_cast
from megatron_zpp.model.fp8.delayed import DelayedLinear
from megatron_zpp.model.fp8.scaling import DelayedScaling
from tests.model.test_fp8 import check_products

CPU = torch.device("cpu")
STEPPED, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def nearest(numbers: Tensor, format: torch.dtype) -> Tensor:
    """The nearest of all codes to each number, of two the even one; by search, in float64."""
    every = torch.arange(128, dtype=torch.uint8)
    values = every.view(format).double()
    every, values = every[values.isfinite()], values[values.isfinite()]  # they grow with their bits
    size = numbers.double().abs()
    above = torch.searchsorted(values, size).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - size, size - values[below]
    even_above = every[above] % 2 == 0
    chosen = torch.where((to_above < to_below) | ((to_above == to_below) & even_above), above, below)
    return every[chosen] | (numbers.signbit().to(torch.uint8) << 7)


@pytest.mark.parametrize("kind", [INPUT, GRADIENT])
def test_codes_are_the_nearest_ones_and_saturate(kind: int) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(48, 80, generator=draw) * 2.0 ** torch.randint(-20, 18, (48, 80), generator=draw)
    factors = factors_of(torch.tensor([3.0, 3.0, 3.0]))
    maxima = torch.zeros(3)
    rows, columns = plain_cast(x, factors, maxima, kind, rows=True, columns=True)
    assert torch.equal(rows.view(torch.uint8), nearest(x * 3.0, FORMATS[kind]))
    assert torch.equal(columns.view(torch.uint8), rows.view(torch.uint8).t())
    assert (rows.float().abs() == LARGEST[kind]).any()  # some were larger
    assert maxima[kind] == x.abs().max()
    assert maxima.count_nonzero() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_scales_each_tensor_by_itself(dtype: torch.dtype) -> None:
    check_products(32, 48, 16, dtype, kind=DelayedLinear)


def results(layer: DelayedLinear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients, in bf16."""
    x = x.detach().requires_grad_()
    layer.weight.grad = None
    out = layer(x)
    out.backward(gradient)
    return [out.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("seed", range(2))
def test_scales_of_equal_tensors_give_equal_products(seed: int) -> None:
    """A second step with the tensors of the first: its scales are those that the first found for itself."""
    torch.manual_seed(seed)
    layer = DelayedLinear(32, 48).bfloat16()
    scaling = DelayedScaling(layer, CPU)
    x, gradient = torch.randn(16, 32).bfloat16(), torch.randn(16, 48).bfloat16() * 1e-5
    first = results(layer, x, gradient)
    scaling.end_step(scaling.maxima(), STEPPED)
    scaling.begin_step()
    for mine, theirs in zip(results(layer, x, gradient), first, strict=True):
        assert torch.equal(mine, theirs)
    larger = results(layer, x * 3, gradient)[0]  # the scale is that of x, so that its peaks saturate
    assert larger.isfinite().all()
    assert not torch.equal(larger, first[0] * 3)
    assert scaling.maxima()[0, 0] == (x * 3).abs().max()


def scales_after(maxima: list[float], skipped: tuple[int, ...] = (), **settings: Any) -> list[float]:
    """The scale of the input after each step, of a history of `maxima`."""
    layer = nn.Sequential(DelayedLinear(16, 16))
    scaling = DelayedScaling(layer, CPU, **settings)
    found = []
    for step, largest in enumerate(maxima):
        scaling.end_step(torch.full((1, 3), largest), SKIPPED if step in skipped else STEPPED)
        state = scaling.state()
        assert list(state) == ["0"]
        found.append(state["0"]["scales"][0])
        factors = layer[0].product.factors
        assert torch.equal(factors, factors_of(torch.tensor(state["0"]["scales"])))
        assert all(back(factors, kind).data_ptr() % 16 == 0 for kind in range(3))  # as cuBLASLt wants it
    return found


def test_the_rule_of_scales() -> None:
    assert scales_after([7.0, 14.0, 7.0, 3.5]) == [64, 32, 64, 128]
    assert scales_after([7.0, 14.0, 7.0, 3.5, 1.75], history=2, algorithm="max") == [64, 32, 32, 64, 128]
    assert scales_after([0.0, 7.0, 0.0]) == [1, 64, 64]  # zeros change no scale
    assert scales_after([7.0, 56.0, 7.0], skipped=(1,), history=2, algorithm="max") == [64, 64, 64]
    assert scales_after([7.0, 14.0], skipped=(0,)) == [64, 32]  # there is no other


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_finite_is_seen_in_its_step_only(bad: float, known: bool) -> None:
    layer = DelayedLinear(16, 16)
    scaling = DelayedScaling(layer, CPU)
    x, gradient = torch.ones(16, 16), torch.ones(16, 16)
    if known:
        results(layer, x, gradient)
        scaling.end_step(scaling.maxima(), STEPPED)
    spoiled = x.clone()
    spoiled[3, 5] = bad
    assert layer(spoiled)[3].isnan().all()
    spoiled_gradient = gradient.clone()
    spoiled_gradient[3, 5] = bad
    _, of_x, of_weight = results(layer, x, spoiled_gradient)
    assert not of_x[3].isfinite().any()
    assert not of_weight[5].isfinite().any()
    assert torch.equal(scaling.maxima()[0, [0, 2]], torch.ones(2))
    scaling.end_step(scaling.maxima(), SKIPPED)
    assert all(part.isfinite().all() for part in results(layer, x, gradient))


def test_a_state_survives_being_saved_and_a_shorter_history_keeps_the_newest() -> None:
    layer = nn.Sequential(DelayedLinear(16, 16), DelayedLinear(16, 16))
    saved = DelayedScaling(layer, CPU, history=3, algorithm="max")
    assert saved.state() is None
    for step in range(4):
        saved.end_step(torch.rand(2, 3, generator=torch.Generator().manual_seed(step)), STEPPED)
    state = saved.state()
    for length in (2, 3, 5):
        other = DelayedScaling(layer, CPU, history=length, algorithm="max")
        other.load_state(state)
        assert other.known
        maxima = torch.full((2, 3), 1e-3)
        other.end_step(maxima, STEPPED)
        expected = DelayedScaling(layer, CPU, history=length, algorithm="max")
        for step in range(max(0, 4 - min(length, 3)), 4):
            expected.end_step(torch.rand(2, 3, generator=torch.Generator().manual_seed(step)), STEPPED)
        expected.end_step(maxima, STEPPED)
        assert other.state() == expected.state()
    other.load_state(None)
    assert not other.known
    assert layer[0].product.factors is None
    with pytest.raises(ValueError, match=r"those of another model: 1$"):
        DelayedScaling(layer[:1], CPU).load_state(state)


def test_maxima_stay_in_fp32() -> None:
    """Kernels compare them as 32-bit integers."""
    assert DelayedLinear(16, 16).to(torch.bfloat16).product.maxima.dtype == torch.float32
