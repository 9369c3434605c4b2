"""The kernels of layer norm against float64, as they are and inside a graph."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.compiled import FORMATS

Norm = nn.LayerNorm | nn.RMSNorm
Function = Callable[..., Tensor]


def inputs(
    rows: int, width: int, dtype: torch.dtype, kind: type[nn.Module] = nn.LayerNorm
) -> tuple[list[Tensor], list[Norm]]:
    """x, what is added to it, two biases, and two norms; rows of a mean far from zero among them."""
    draw = torch.Generator("cuda").manual_seed(width)
    x, added = torch.randn(2, rows, width, generator=draw, device="cuda")
    x[::3] += 5.0
    norms = [kind(width, eps=1e-5, device="cuda") for _ in range(2)]
    for parameter in (parameter for module in norms for parameter in module.parameters()):
        parameter.data += 0.2 * torch.randn(width, generator=draw, device="cuda")
    biases = torch.randn(2, width, generator=draw, device="cuda")
    tensors = [part.to(dtype).requires_grad_() for part in (x, added, *biases)]
    return tensors, [module.to(dtype) for module in norms]


def in_float64(tensors: list[Tensor], norms: list[Norm]) -> tuple[list[Tensor], list[Norm]]:
    """Copies of the same numbers."""
    copies = [copy.deepcopy(module).double() for module in norms]
    return [part.detach().double().requires_grad_() for part in tensors], copies


def ours(x: Tensor, added: Tensor, before: Tensor, after: Tensor, first: Norm, second: Norm) -> Tensor:
    from megatron_zpp.model.fused.norm import add_norm, norm

    normed, token = norm(x, first)
    total, again = add_norm(x, added * normed + before.detach(), token, second, (before, after))
    return torch.stack((normed, total + after.detach(), again))


def without_biases(x: Tensor, added: Tensor, before: Tensor, after: Tensor, *norms: Norm) -> Tensor:
    from megatron_zpp.model.fused.norm import add_norm, norm

    normed, token = norm(x, norms[0])
    total, again = add_norm(x, added * normed + before, token, norms[1])
    return torch.stack((normed, total + after, again))


def torchs(x: Tensor, added: Tensor, before: Tensor, after: Tensor, first: Norm, second: Norm) -> Tensor:
    normed = first(x)
    total = x + (added * normed + before)
    return torch.stack((normed, total + after, second(total)))


def results(function: Function, tensors: list[Tensor], norms: list[Norm], weights: Tensor) -> list[Tensor]:
    """What it returns, and all gradients."""
    out = function(*tensors, *norms)
    parameters = [parameter for module in norms for parameter in module.parameters()]
    return [out, *torch.autograd.grad(out, [*tensors, *parameters], weights.to(out.dtype))]


@pytest.mark.parametrize("fused", [ours, without_biases])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (700, 1000), (4096, 2048), (1500, 2560), (300, 12288)])
@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
def test_results_are_as_exact_as_torchs(
    rows: int, width: int, dtype: torch.dtype, fused: Function, compiles: bool
) -> None:
    """At most twice the error of torch's own kernels in the same format, which round as often."""
    torch._dynamo.reset()
    given = inputs(rows, width, dtype)
    weights = torch.randn(3, rows, width, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    function = torch.compile(fused, fullgraph=True, dynamic=False) if compiles else fused
    exact = results(torchs, *in_float64(*given), weights)
    found, plain = results(function, *given, weights), results(torchs, *given, weights)
    for mine, theirs, expected in zip(found, plain, exact, strict=True):
        error, allowed = (torch.linalg.vector_norm(part.double() - expected) for part in (mine, theirs))
        smallest = torch.finfo(torch.float32).eps * torch.linalg.vector_norm(expected)
        assert error <= 2 * allowed + smallest


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (700, 1000), (1500, 4096)])
@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
def test_rms_norms_are_as_exact_as_torchs(rows: int, width: int, dtype: torch.dtype, compiles: bool) -> None:
    torch._dynamo.reset()
    given = inputs(rows, width, dtype, nn.RMSNorm)
    weights = torch.randn(3, rows, width, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    function = torch.compile(without_biases, fullgraph=True) if compiles else without_biases
    exact = results(torchs, *in_float64(*given), weights)
    found, plain = results(function, *given, weights), results(torchs, *given, weights)
    for mine, theirs, expected in zip(found, plain, exact, strict=True):
        error, allowed = (torch.linalg.vector_norm(part.double() - expected) for part in (mine, theirs))
        smallest = torch.finfo(torch.float32).eps * torch.linalg.vector_norm(expected)
        assert error <= 2 * allowed + smallest


@pytest.mark.parametrize("path", [0, 1, 2])
def test_no_gradient_is_lost_where_only_one_path_is_used(path: int) -> None:
    """The first norm alone, the sum, or the second norm."""
    given = inputs(10, 256, torch.float32)
    gradients = []
    for function, (tensors, norms) in ((ours, given), (torchs, in_float64(*given))):
        wanted = [*tensors, *norms[0].parameters(), *norms[1].parameters()]
        out = function(*tensors, *norms)[path].square().sum()
        gradients.append(torch.autograd.grad(out, wanted, materialize_grads=True))
    for found, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
