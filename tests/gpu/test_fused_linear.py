"""Heads and GELU with the gradients of their maps' biases against float64, as they are and inside a graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.compiled import FORMATS

HEADS = 4


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, list[nn.Linear]]:
    """x (1, R, W), a map to heads and one into an MLP."""
    draw = torch.Generator("cuda").manual_seed(width)
    x = torch.randn(1, rows, width, generator=draw, device="cuda")
    maps = [nn.Linear(width, columns, device="cuda") for columns in (3 * width, 4 * width - 8)]
    for module in maps:
        module.weight.data.normal_(0, 2 / width**0.5, generator=draw)
        module.bias.data.normal_(0, 0.5, generator=draw)
    return x.to(dtype).requires_grad_(), [module.to(dtype) for module in maps]


def in_float64(x: Tensor, maps: list[nn.Linear]) -> tuple[Tensor, list[nn.Linear]]:
    """Copies of the same numbers."""
    copies = [nn.Linear(m.in_features, m.out_features, device="cuda", dtype=torch.double) for m in maps]
    for copy, module in zip(copies, maps, strict=True):
        copy.load_state_dict(module.state_dict())
    return x.detach().double().requires_grad_(), copies


def ours(x: Tensor, to_heads: nn.Linear, into: nn.Linear) -> list[Tensor]:
    from megatron_zpp.model.fused.linear import gelu_of_linear, heads_of_linear

    q, k, v = heads_of_linear(x, to_heads, HEADS, x.shape[-1] // HEADS)
    return [q, k, v, gelu_of_linear(x, into)]


def torchs(x: Tensor, to_heads: nn.Linear, into: nn.Linear) -> list[Tensor]:
    q, k, v = to_heads(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
    return [q, k, v, F.gelu(into(x), approximate="tanh")]


def results(
    function: Callable[..., list[Tensor]], x: Tensor, maps: list[nn.Linear], weights: list[Tensor]
) -> list[Tensor]:
    """What it returns, and all gradients."""
    out = function(x, *maps)
    parameters = [parameter for module in maps for parameter in module.parameters()]
    given = [weight.to(part.dtype) for weight, part in zip(weights, out, strict=True)]
    return [*out, *torch.autograd.grad(out, [x, *parameters], given)]


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (700, 200), (4096, 1024), (300, 2560)])
@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
def test_results_are_as_exact_as_torchs(rows: int, width: int, dtype: torch.dtype, compiles: bool) -> None:
    """At most twice the error of torch's own kernels in the same format, which round as often."""
    torch._dynamo.reset()
    given = inputs(rows, width, dtype)
    exact_given = in_float64(*given)
    draw = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(part.shape, generator=draw, device="cuda") for part in torchs(*_flat(given))]
    function = torch.compile(ours, fullgraph=True, dynamic=False) if compiles else ours
    found, plain = results(function, *given, weights), results(torchs, *given, weights)
    for mine, theirs, expected in zip(found, plain, results(torchs, *exact_given, weights), strict=True):
        error, allowed = (torch.linalg.vector_norm(part.double() - expected) for part in (mine, theirs))
        smallest = 4 * torch.finfo(torch.float32).eps * torch.linalg.vector_norm(expected)
        assert error <= 2 * allowed + smallest


def test_large_and_special_numbers_go_through_gelu_as_through_torchs() -> None:
    from megatron_zpp.model.fused.linear import gelu_of_linear

    numbers = [0.0, -0.0, 1e-30, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, float("inf"), float("nan")]
    x = torch.tensor(numbers, device="cuda")[:, None]
    into = nn.Linear(1, 1, device="cuda")
    into.weight.data.fill_(1.0)
    into.bias.data.fill_(0.0)
    expected = F.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu_of_linear(x, into), expected, rtol=1e-6, atol=1e-30, equal_nan=True)
    x = x[:7].clone().requires_grad_()
    (found,) = torch.autograd.grad(gelu_of_linear(x, into).sum(), x)
    assert torch.equal(found[5:], torch.tensor([[1.0], [0.0]], device="cuda"))


def _flat(given: tuple[Tensor, list[nn.Linear]]) -> list[Tensor | nn.Linear]:
    return [given[0], *given[1]]
