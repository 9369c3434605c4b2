"""The chunked loss on a GPU, at the sizes of a 1.3B model's output layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_zpp.model.loss import Objective, chunk_rows, keeps_gradient, linear_cross_entropy
from tests.gpu.steady import waits_are_errors
from tests.model.test_loss import error, plain, results

WIDTH, VOCAB, PADDED = 2048, 50257, 50304
ALONE, WITH_ALL = Objective(VOCAB), Objective(VOCAB, cap=8.0, z_coeff=0.01)
SIZES = (512, 8192, 16384)  # one chunk; several, of which the gradient is kept; several, in fp32 sums


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=generator, device="cuda").mul_(0.05)
    targets = torch.randint(VOCAB, (tokens,), generator=generator, device="cuda")
    targets[5] = -100
    return x, weight.to(dtype), targets


def fused(x: Tensor, weight: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    from megatron_zpp.model.fused.loss import PASSES

    return linear_cross_entropy(x, weight, targets, objective, passes=PASSES)


@pytest.mark.parametrize("loss_of", [linear_cross_entropy, fused])
@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("objective", [ALONE, WITH_ALL], ids=["alone", "capped with z-loss"])
def test_losses_and_gradients_are_as_exact_as_the_plain_ones(
    objective: Objective, tokens: int, dtype: torch.dtype, loss_of: Callable[..., Tensor]
) -> None:
    """Against fp32 from the same numbers: at most twice the plain error, as tests/model/test_loss.py says."""
    assert keeps_gradient(tokens, WIDTH, 2) == (tokens <= 8192)
    assert chunk_rows(16384, PADDED) == 2048
    x, weight, targets = inputs(tokens, dtype)
    scale = torch.tensor(0.7 * (1024 if dtype == torch.float16 else 1), device="cuda")
    given = targets, objective, scale
    _, *exact = results(plain, x.float(), weight.float(), *given)
    losses, *gradients = results(loss_of, x, weight, *given)
    plain_losses, *plain_gradients = results(plain, x, weight, *given)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=0)
    exact_sums = (
        torch.finfo(torch.float32).eps * max(tokens, PADDED) ** 0.5
    )  # the gradient of x sums over PADDED
    for found, of_plain, expected in zip(gradients, plain_gradients, exact, strict=True):
        assert error(found, expected) <= 2 * error(of_plain, expected) + exact_sums
    assert torch.count_nonzero(gradients[1][VOCAB:]) == 0
    assert torch.count_nonzero(gradients[0][5]) == 0


def test_a_certain_prediction_keeps_its_small_gradient() -> None:
    """Where softmax is nearly one, it less one is the sum of the others but for roundings."""
    from megatron_zpp.model.fused.loss import logits_to_gradient

    logits = torch.zeros(2, 1000, device="cuda")
    logits[0, 3], logits[1, 3] = 14.0, 8.0
    targets = torch.tensor([3, 3], device="cuda")
    exact = logits.double().softmax(1)
    exact[:, 3] = -(exact.sum(1) - exact[:, 3])
    logits_to_gradient(logits, targets, Objective(1000))
    largest_error = 15 * torch.finfo(torch.float32).eps / 2  # 13 sums, the exponential and the difference
    torch.testing.assert_close(logits.double(), exact, rtol=2e-6, atol=largest_error)


def test_nothing_waits_for_the_device() -> None:
    for tokens in SIZES:
        given = *inputs(tokens, torch.bfloat16), ALONE
        results(linear_cross_entropy, *given)
        with waits_are_errors():
            results(linear_cross_entropy, *given)
            with torch.no_grad():
                linear_cross_entropy(*given)


@pytest.mark.parametrize("loss_of", [linear_cross_entropy, fused])
def test_what_is_not_finite_stays_so(loss_of: Callable[..., Tensor]) -> None:
    for tokens in SIZES:
        x, weight, targets = inputs(tokens, torch.bfloat16)
        x[7, 3] = float("nan")
        loss, of_x, of_weight = results(loss_of, x, weight, targets, ALONE)
        assert loss.isnan()
        assert of_x[7].isnan().all()
        assert of_weight.isnan().any()
