"""The chunked loss against torch's own on the whole logits, in each format and at awkward sizes."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.model import loss as loss_module
from megatron_zpp.model.loss import IGNORED, LossKernels, Objective, chunk_rows, linear_cross_entropy
from megatron_zpp.model.parallel.loss import vocabulary_parallel_loss

CHUNK = 7  # tokens
WIDE, NARROW = 48, 2  # hidden sizes, such that 15 tokens keep the gradient of the logits, or fp32 sums
Loss = Callable[..., Tensor]


def plain(x: Tensor, weight: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """The losses on all logits at once, of which the first has the gradient of their sum."""
    logits = F.linear(x, weight)[:, : objective.vocab_size]
    logits = logits.to(torch.promote_types(x.dtype, torch.float32))
    if objective.cap is not None:
        logits = objective.cap * torch.tanh(logits / objective.cap)
    loss = F.cross_entropy(logits, targets)
    if objective.z_coeff == 0:
        return loss
    z_loss = objective.z_coeff * logits.logsumexp(1)[targets != IGNORED].square().mean()
    return torch.stack((loss + (z_loss - z_loss.detach()), z_loss.detach()))


def chunked(x: Tensor, weight: Tensor, targets: Tensor, objective: Objective, **more: Any) -> Tensor:
    """Ours, in chunks of about CHUNK tokens."""
    return linear_cross_entropy(x, weight, targets, objective, chunk_bytes=4 * CHUNK * len(weight), **more)


def over_ranks(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """As loss.logits_to_gradient, by two tensor ranks, one after the other."""
    parts, statistics = [part.clone() for part in logits.chunk(2, 1)], []
    for rank, part in enumerate(parts):
        group = SimpleNamespace(rank=rank, gather=lambda own: statistics.append(own) or own)
        vocabulary_parallel_loss(group).loss(part, targets, objective)
    for rank, part in enumerate(parts):
        group = SimpleNamespace(rank=rank, gather=lambda own: torch.cat(statistics))
        total = vocabulary_parallel_loss(group).to_gradient(part, targets, objective)
    logits.copy_(torch.cat(parts, 1))
    return total


LOSSES: dict[str, Loss] = {"chunks": chunked, "ranks": partial(chunked, passes=LossKernels(over_ranks))}
OBJECTIVES: list[dict[str, float]] = [{}, {"cap": 4.0}, {"z_coeff": 0.01}, {"cap": 4.0, "z_coeff": 0.01}]


def inputs(
    tokens: int, width: int, vocab: int, padded: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Objective]:
    """x, weight with rows of padding that are not zero, targets, and what is minimised."""
    generator = torch.Generator().manual_seed(tokens + vocab)
    x = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(padded, width, generator=generator)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return x.to(dtype), (weight * 3 / width**0.5).to(dtype), targets, Objective(vocab)


def results(
    loss: Loss, x: Tensor, weight: Tensor, targets: Tensor, objective: Objective, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of x and weight times `factor`."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(x, weight, targets, objective)
    (value.flatten()[0] * factor).backward()
    return value.detach(), x.grad, weight.grad


def exactly(
    x: Tensor, weight: Tensor, targets: Tensor, objective: Objective, factor: float = 1.0
) -> tuple[Tensor, ...]:
    """The same in fp64 from the same logits: those that the product in the format of x gives."""
    x, weight = x.double(), weight.double()
    return results(plain, x, weight, targets, objective, factor)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("tokens", "vocab", "padded"),
    [*itertools.product((1, 6, 7, 8, 14, 15), (50,), (50, 64)), (40, 41, 64), (20, 1, 8), (20, 1, 1)],
)
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("loss", LOSSES)
def test_float64_is_torchs_loss(loss: str, tokens: int, width: int, vocab: int, padded: int) -> None:
    """Any number of chunks, whole or not, of a vocabulary with and without padding, ids that do not count."""
    for ignored, more in itertools.product((0, 3), OBJECTIVES):
        x, weight, targets, _ = inputs(tokens, width, vocab, padded, torch.float64)
        targets[1 : 1 + ignored] = IGNORED
        given = x, weight, targets, Objective(vocab, **more), 3.0
        for found, expected in zip(results(LOSSES[loss], *given), results(plain, *given), strict=True):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("loss", "width"), [("chunks", NARROW), *((loss, WIDE) for loss in LOSSES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_format_is_as_exact_as_the_plain_loss(dtype: torch.dtype, width: int, loss: str) -> None:
    """fp32 and 16 bits round differently here and there, never more: twice the plain errors at most.

    The plain loss rounds the gradient of the logits once, ours once more, or what it is multiplied with,
    because of the factor; both round the product. Errors of independent roundings add up as squares: √3 / √2
    of the plain error, below 2.
    """
    for tokens, more in itertools.product((15, 200), OBJECTIVES):
        x, weight, targets, _ = inputs(tokens, width, 50, 64, dtype)
        given = x, weight, targets, Objective(50, **more)
        exact = exactly(*given, factor=0.7)
        found, expected = results(LOSSES[loss], *given, factor=0.7), results(plain, *given, factor=0.7)
        assert found[0].dtype == torch.float32
        rounding = 4 * torch.finfo(torch.float32).eps * expected[0].max()
        assert torch.allclose(found[0], expected[0], rtol=0, atol=rounding.item())
        for ours, plains, exacts in zip(found[1:], expected[1:], exact[1:], strict=True):
            assert ours.dtype == dtype
            assert error(ours, exacts) <= 2 * error(plains, exacts) + 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("tokens", [1, 15])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_fp16_keeps_gradients_that_the_plain_loss_loses_no_earlier(tokens: int, width: int) -> None:
    """Probabilities down to fp16's smallest number over the loss scale that the backward brings."""
    vocab, scale = 4000, 2.0**12 * tokens
    x = torch.ones(tokens, width, dtype=torch.float16)
    weight = torch.zeros(vocab, width, dtype=torch.float16)
    weight[0], weight[1] = 12.0 / width, -9.0 / width  # logits 12, -9 and 0
    targets = torch.zeros(tokens, dtype=torch.long)
    given = x, weight, targets, Objective(vocab)
    _, _, exact = exactly(*given, factor=scale)
    for loss in (plain, chunked):
        _, _, found = results(loss, *given, factor=scale)
        assert torch.allclose(found.double(), exact, rtol=2e-2, atol=2.0**-23 * tokens), loss
    assert found[1, 0] > 0
    assert found[2, 0] > 0


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[bool, bool], width: int) -> None:
    x, weight, targets, objective = inputs(15, width, 50, 64)
    _, of_x, of_weight = results(chunked, x, weight, targets, objective)
    x.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1])
    loss = chunked(x, weight, targets, objective)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
    for tensor, expected, is_wanted in ((x, of_x, wanted[0]), (weight, of_weight, wanted[1])):
        assert torch.equal(tensor.grad, expected) if is_wanted else tensor.grad is None


def test_without_gradients_the_loss_is_the_same() -> None:
    """The cross-entropy of an evaluation, with no z-loss beside it."""
    for width, more in itertools.product((WIDE, NARROW), OBJECTIVES):
        x, weight, targets, _ = inputs(40, width, 50, 64)
        given = x, weight, targets, Objective(50, **more)
        expected = results(plain, *given)[0].flatten()[0].item()
        with torch.no_grad():
            assert chunked(*given).item() == pytest.approx(expected, rel=1e-6)
        with torch.inference_mode():
            assert chunked(given[0], given[1].requires_grad_(), *given[2:]).item() == pytest.approx(expected)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_gradients_accumulate_and_repeat_bit_for_bit(width: int) -> None:
    x, weight, targets, objective = inputs(15, width, 50, 64)
    _, of_x, of_weight = results(chunked, x, weight, targets, objective)
    x.requires_grad_(), weight.requires_grad_()
    first = chunked(x, weight, targets, objective)
    second = chunked(x, weight, targets, objective)  # before the backward of the first
    (first + second).backward()
    assert torch.equal(first, second)
    assert torch.equal(x.grad, 2 * of_x)
    assert torch.equal(weight.grad, 2 * of_weight)


@pytest.mark.parametrize(("width", "dtype"), [(WIDE, torch.float16), (NARROW, torch.float32)])
def test_a_second_backward_is_refused_where_it_would_be_wrong(width: int, dtype: torch.dtype) -> None:
    """What waits for the backward is scaled where it lies: a second one would scale it again."""
    x, weight, targets, objective = inputs(15, width, 50, 64, dtype)
    loss = chunked(x.requires_grad_(), weight, targets, objective)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_ids_that_all_do_not_count_give_zero(width: int) -> None:
    x, weight, targets, objective = inputs(15, width, 50, 64)
    loss, of_x, of_weight = results(chunked, x, weight, torch.full_like(targets, IGNORED), objective)
    assert loss == 0
    assert torch.count_nonzero(of_x) == torch.count_nonzero(of_weight) == 0


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["x", "weight", "factor"])
def test_what_is_not_finite_stays_so(place: str, poison: float, dtype: torch.dtype, width: int) -> None:
    """As plain torch has it, so that the step is skipped."""
    x, weight, targets, objective = inputs(15, width, 50, 64, dtype)
    factor = poison if place == "factor" else 1.0
    if place == "x":
        x[9, 1] = poison
    if place == "weight":
        weight[3, 0] = poison
    loss, *gradients = results(chunked, x, weight, targets, objective, factor)
    assert torch.isfinite(loss).item() == (place == "factor")
    for gradient in gradients:
        assert not torch.isfinite(gradient).all()
    if place == "x":
        assert not torch.isfinite(gradients[0][9]).any()


def test_chunks_are_equal_where_they_can_be() -> None:
    for tokens, entries in itertools.product((1, 512, 2048, 8192, 12288, 16384, 5120, 8191), (50304, 50257)):
        rows = chunk_rows(tokens, entries)
        assert 4 * rows * entries <= 512 * 2**20
        assert tokens % rows == 0 or tokens == 8191
        assert (
            rows > 512 * 2**20 // (4 * entries) // 2 or rows == tokens
        )  # no more chunks than twice the fewest
    assert chunk_rows(16384, 50304) == 2048
    assert chunk_rows(3, 10**9) == 1
    assert chunk_rows(0, 50304) == 1


def test_a_lean_chunk_is_no_larger_than_what_each_chunk_reads_and_writes() -> None:
    """Llama 3.2 1B, 8 × 2048 tokens: four chunks, not eight of 1 GiB of fp32 logits; GPT-3 1.3B as ever."""
    llama, gpt = (
        loss_module.default_chunk_bytes(*shape, 2, lean=True) for shape in ((128_256, 2048), (50_304, 2048))
    )
    assert chunk_rows(16_384, 128_256, llama) == 4096
    assert 2 * 4096 * 128_256 <= 4 * 128_256 * 2048
    assert gpt == loss_module.LEAN_CHUNK_BYTES
    assert loss_module.default_chunk_bytes(128_256, 2048, 2, lean=False) == loss_module.CHUNK_BYTES
