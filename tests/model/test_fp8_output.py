"""The output layer's 8-bit products with the loss: against float64 from codes that are chosen by search."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.model.fp8.cast import FORMATS, GRADIENT, INPUT, WEIGHT
from megatron_zpp.model.fp8.delayed import DelayedLinear
from megatron_zpp.model.fp8.output import OutputProduct, coded_chunk_rows, part_rows
from megatron_zpp.model.fp8.scaling import DelayedScaling
from megatron_zpp.model.loss import IGNORED, Objective, linear_cross_entropy, logits_to_codes
from tests.model import test_loss
from tests.model.test_fp8_delayed import CPU, SKIPPED, STEPPED, nearest
from tests.model.test_loss import error, plain

PADDED, VOCAB = 1008, 1001
OBJECTIVE, WITH_ALL = Objective(VOCAB), Objective(VOCAB, cap=5.0, z_coeff=0.01)
CHUNK = 4 * 48 * PADDED  # bytes: 48 tokens
SIZES = [(16, 32), (176, 32), (48, 16), (336, 16)]  # tokens and width; the last have three parts
BF16_ULP, UNIT = 2.0**-8, 2.0**15


def inputs(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, a table with rows of padding that are not zero, targets of which some do not count."""
    draw = torch.Generator().manual_seed(tokens + width)
    x, weight = torch.randn(tokens, width, generator=draw), torch.randn(PADDED, width, generator=draw)
    targets = torch.randint(VOCAB, (tokens,), generator=draw)
    targets[3:5] = IGNORED
    return x.to(dtype), (weight * 2 / width**0.5).to(dtype), targets


def output_layer() -> tuple[OutputProduct, DelayedScaling]:
    model = nn.Module()
    model.head = nn.Module()
    model.head.product = OutputProduct()
    return model.head.product, DelayedScaling(model, CPU)


def results(
    product: OutputProduct,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    factor: float = 1.0,
    objective: Objective = OBJECTIVE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of x and weight times `factor`."""
    loss = partial(product.loss, chunk_bytes=CHUNK)
    return test_loss.results(loss, x, weight, targets, objective, factor)


def decoded(x: Tensor, scale: float, kind: int) -> Tensor:
    """The number that each code stands for, in float64; those too large saturate."""
    return nearest(x.float() * scale, FORMATS[kind]).view(FORMATS[kind]).double() / scale


def oracle(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scales: tuple[float, float],
    factor: float,
    objective: Objective,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64: sums are exact, and what is coded or kept in the format of x is rounded."""
    codes, table = decoded(x, scales[0], INPUT), decoded(weight, scales[1], WEIGHT)
    logits = (codes @ table.T).to(x.dtype).double().requires_grad_()
    losses = plain(logits, torch.eye(PADDED, dtype=logits.dtype), targets, objective)
    count = (targets != IGNORED).sum()
    (losses.flatten()[0] * count).backward()
    gradient = decoded(logits.grad, UNIT, GRADIENT) * factor / count
    return losses.detach(), gradient @ table, gradient.T @ codes


def scale_of(x: Tensor) -> float:
    return (448.0 / x.abs().max().float()).item()


@pytest.mark.parametrize(("tokens", "width"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("objective", [OBJECTIVE, WITH_ALL], ids=["alone", "capped with z-loss"])
def test_products_are_those_of_the_nearest_codes(
    tokens: int, width: int, dtype: torch.dtype, objective: Objective
) -> None:
    """In a first step, and with scales of an earlier one; of several chunks, whole or not, and parts."""
    assert part_rows(tokens, width) == {336: 112}.get(tokens, tokens)
    x, weight, targets = inputs(tokens, width, dtype)
    product, scaling = output_layer()
    scales = scale_of(x), scale_of(weight)
    for first in (True, False):
        given = (x, weight) if first else (3 * x, weight / 2)  # of which the largest saturate
        if first and tokens > part_rows(tokens, width):
            product.maxima[INPUT], product.maxima[WEIGHT] = x.abs().max(), weight.abs().max()
        else:
            found = results(product, *given, targets, 0.7, objective)
            exact = oracle(*given, targets, scales, 0.7, objective)
            assert found[0].dtype == torch.float32
            # A logit next to a tie of its format is rounded to either side.
            rounding = 2.0**-20 if first else 2.0**-16
            torch.testing.assert_close(found[0].double(), exact[0], rtol=rounding, atol=0)
            for mine, theirs in zip(found[1:], exact[1:], strict=True):
                assert mine.dtype == dtype
                assert error(mine, theirs) <= (2 * BF16_ULP if dtype == torch.bfloat16 else 2.0**-9)
            assert torch.count_nonzero(found[1][3:5]) == torch.count_nonzero(found[2][VOCAB:]) == 0
            maxima = scaling.maxima()[0]
            assert maxima.tolist() == [each.abs().max().item() for each in given] + [0.0]
        scaling.end_step(scaling.maxima(), STEPPED)
        scaling.begin_step()


def test_the_constant_scale_of_gradients_keeps_what_is_small() -> None:
    """Three significant bits down to 2^-29, half of 2^-31 below; nothing is too large."""
    logits = torch.linspace(-40.0, 0.0, PADDED).repeat(16, 1)
    targets = torch.full((16,), 7)
    exact = logits.double()[:, :VOCAB].softmax(1)
    exact[:, 7] -= 1
    rows = torch.empty(16, PADDED, dtype=FORMATS[GRADIENT])
    columns = torch.empty(PADDED, 16, dtype=FORMATS[GRADIENT])
    logits_to_codes(logits, targets, OBJECTIVE, rows, columns)
    found = rows.double() / UNIT
    assert torch.equal(columns.view(torch.uint8).t(), rows.view(torch.uint8))
    off = (found[:, :VOCAB] - exact).abs()
    assert (off <= torch.maximum(exact.abs() * 2.0**-3 * (1 + 1e-5), torch.tensor(2.0**-32))).all()
    assert (exact.abs() < 2.0**-33).any()
    assert torch.count_nonzero(found[:, VOCAB:]) == 0


@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_without_gradients_the_loss_is_the_same(tokens: int, width: int) -> None:
    x, weight, targets = inputs(tokens, width)
    product, scaling = output_layer()
    results(product, x, weight, targets)
    scaling.end_step(scaling.maxima(), STEPPED)
    expected = results(product, x, weight, targets)[0].item()
    with torch.no_grad():
        assert product.loss(x, weight, targets, OBJECTIVE).item() == pytest.approx(expected, rel=1e-6)
        some = x[:9], weight, targets[:9]  # any number of tokens
        wide = linear_cross_entropy(*some, OBJECTIVE).item()
        assert product.loss(*some, OBJECTIVE).item() == pytest.approx(wide, abs=0.05)


@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_gradients_accumulate_and_repeat_bit_for_bit(tokens: int, width: int) -> None:
    x, weight, targets = inputs(tokens, width)
    product, _ = output_layer()
    value, of_x, of_weight = results(product, x, weight, targets)
    x.requires_grad_(), weight.requires_grad_()
    first, second = (product.loss(x, weight, targets, OBJECTIVE, chunk_bytes=CHUNK) for _ in range(2))
    (first + second).backward()
    assert torch.equal(first, value)
    assert torch.equal(second, value)
    assert torch.equal(x.grad, 2 * of_x)
    assert torch.equal(weight.grad, 2 * of_weight)


@pytest.mark.parametrize(("tokens", "width"), SIZES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["x", "weight", "factor"])
@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_finite_stays_so(place: str, poison: float, tokens: int, width: int, known: bool) -> None:
    """As in plain torch, so that the step is skipped; and later scales are sound."""
    x, weight, targets = inputs(tokens, width)
    product, scaling = output_layer()
    if known:
        results(product, x, weight, targets)
        scaling.end_step(scaling.maxima(), STEPPED)
        scaling.begin_step()
    bad = x.clone(), weight.clone()
    if place != "factor":
        bad[place == "weight"][9, 1] = poison
    loss, *gradients = results(product, *bad, targets, poison if place == "factor" else 1.0)
    assert torch.isfinite(loss).item() == (place == "factor")
    for gradient in gradients:
        assert not torch.isfinite(gradient).all()
    if place == "x":
        assert not torch.isfinite(gradients[0][9]).any()
    scaling.end_step(scaling.maxima(), SKIPPED)
    assert scaling.maxima().isfinite().all()
    assert all(part.isfinite().all() for part in results(product, x, weight, targets))


def test_parts_and_chunks_have_sizes_of_products() -> None:
    for tokens, width in itertools.product((16, 160, 4096, 16384, 20000, 65536), (16, 768, 2048, 8192)):
        part = part_rows(tokens, width)
        assert part % 16 == 0
        assert part <= 8 * width
        assert (part >= tokens) == (tokens <= 8 * width)
        chunk = coded_chunk_rows(part, 50304, 2**30)
        assert chunk % 16 == 0
        assert 4 * (chunk - 15) * 50304 <= 2**30


STEPS = [torch.rand(3, 3, generator=torch.Generator().manual_seed(step)) for step in range(4)]


def scaling_of(output: bool, **settings: Any) -> DelayedScaling:
    model = nn.Module()
    model.layers, model.head = nn.Sequential(DelayedLinear(16, 16), DelayedLinear(16, 16)), nn.Module()
    if output:
        model.head.product = OutputProduct()
    return DelayedScaling(model, CPU, **settings)


def test_a_resumed_run_may_begin_or_cease_to_have_8_bit_products_there() -> None:
    """Scales of other maps go on; those of the output layer begin with the next step's own."""
    runs = {output: scaling_of(output, history=3, algorithm="max") for output in (False, True)}
    for step in STEPS:
        for output, scaling in runs.items():
            scaling.end_step(step[: 2 + output], STEPPED)
    states = {output: scaling.state() for output, scaling in runs.items()}
    assert states[True] == states[False] | {"head": states[True]["head"]}
    ceased = scaling_of(False, history=3, algorithm="max")
    ceased.load_state(states[True])
    assert ceased.state() == states[False]
    begun = scaling_of(True, history=3, algorithm="max")
    begun.load_state(states[False])
    assert begun.known
    products = begun._products
    assert [name for name, product in products.items() if product.factors is None] == ["head"]
    begun.end_step(STEPS[0], STEPPED)
    assert all(product.factors is not None for product in products.values())
