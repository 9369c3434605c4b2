"""Weights that are held as codes: the same products and gradients, and every code by an oracle."""

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.model.fp8.delayed import DelayedLinear
from megatron_zpp.model.fp8.scaling import DelayedScaling
from megatron_zpp.model.fp8.weights import WeightCodes
from tests.model.test_fp8_delayed import CPU, STEPPED, nearest, results

E4M3 = torch.float8_e4m3fn


def held(master: Tensor) -> tuple[nn.Sequential, DelayedScaling, WeightCodes, Tensor]:
    """A linear map whose weight (N, K) is held as codes, which are still to be written."""
    outputs, inputs = master.shape
    model = nn.Sequential(DelayedLinear(inputs, outputs, bias=False)).bfloat16()
    scaling = DelayedScaling(model, CPU)
    weights, codes = WeightCodes(scaling), torch.zeros(outputs, inputs, dtype=torch.uint8)
    assert weights.names == ("0.weight",)
    weights.attach("0.weight", codes)
    model[0].weight = nn.Parameter(torch.full((), torch.nan, dtype=torch.bfloat16).expand(outputs, inputs))
    return model, scaling, weights, codes.view(-1)


def write(weights: WeightCodes, master: Tensor, codes: Tensor, cuts: tuple[int, ...] = ()) -> None:
    """Encode a weight in parts, as several ranks do."""
    numbers = master.flatten()
    weights.begin()
    for part, room in zip(numbers.tensor_split(cuts), codes.tensor_split(cuts), strict=True):
        weights.encode("0.weight", part, room)


def start(weights: WeightCodes, *parts: Tensor) -> Tensor:
    """Scale a weight by itself; returns the maxima."""
    found = list[Tensor]()

    def over_ranks(maxima: Tensor) -> Tensor:
        found.append(maxima)
        return maxima

    weights.start([("0.weight", part) for part in parts], over_ranks)
    return found[0]


@pytest.mark.parametrize("seed", range(2))
def test_products_and_gradients_are_those_of_a_cast(seed: int) -> None:
    """Of a weight that bf16 has exactly, before scales are known and with them."""
    torch.manual_seed(seed)
    master = torch.randn(48, 32).bfloat16().float()
    x, gradient = torch.randn(16, 32).bfloat16(), torch.randn(16, 48).bfloat16() * 1e-5
    plain = nn.Sequential(DelayedLinear(32, 48, bias=False)).bfloat16()
    plain[0].weight.data.copy_(master)
    other = DelayedScaling(plain, CPU)
    model, scaling, weights, codes = held(master)
    start(weights, *master.flatten().tensor_split((512,)))
    for step in range(3):
        write(weights, master, codes, (256, 1024))
        x = x * (1 + step)
        for found, expected in zip(
            results(model[0], x, gradient), results(plain[0], x, gradient), strict=True
        ):
            assert torch.equal(found, expected)
        assert torch.equal(scaling.maxima(), other.maxima())
        for each in (scaling, other):
            each.end_step(each.maxima(), STEPPED)
            each.begin_step()
        assert scaling.state() == other.state()


def test_codes_are_of_the_fp32_numbers_and_saturate() -> None:
    """By the scale of the step before, where numbers have grown; NaN and Inf count for no maximum."""
    torch.manual_seed(1)
    master = torch.randn(32, 16)
    _, scaling, weights, codes = held(master)
    start(weights, master.flatten())
    write(weights, master, codes)
    scale = torch.tensor(448.0) / master.abs().max()
    assert torch.equal(codes, nearest(master * scale, E4M3).flatten())
    assert not torch.equal(codes, nearest(master.bfloat16().float() * scale, E4M3).flatten())
    scaling.end_step(scaling.maxima(), STEPPED)
    grown = master * 3
    write(weights, grown, codes)
    assert torch.equal(codes, nearest(grown * scale, E4M3).flatten())
    assert codes.view(E4M3).float().abs().max() == 448
    assert scaling.maxima()[0, 1] == grown.abs().max()
    grown[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    write(weights, grown, codes)
    assert codes.view(E4M3)[:3].float().isnan().all()
    assert scaling.maxima()[0, 1] == grown[grown.isfinite()].abs().max()


def test_the_scales_of_a_start_know_no_nan_and_no_zero() -> None:
    master = torch.zeros(16, 16)
    model, _, weights, codes = held(master)
    for largest, first in ((0.0, 0.0), (2.0, torch.nan), (2.0, -torch.inf)):
        master[1, 1], master[0, 0] = largest, first
        weights.begin()
        assert start(weights, master.flatten()).tolist() == [largest]
        write(weights, master, codes)
        found = codes.view(E4M3).float()
        assert found.isnan().sum() == (0 if first == 0 else 1)
        assert found[17] == (448.0 if largest else 0.0)
        assert model[0](torch.ones(16, 16).bfloat16()).isnan().any() == (first != 0)
