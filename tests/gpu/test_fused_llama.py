"""The kernels of RoPE and SwiGLU against float64, as they are and inside a graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_zpp.model.layer import swiglu
from megatron_zpp.model.rotary import RotaryEmbedding, Rotation
from tests.gpu.compiled import FORMATS

Function = Callable[[Tensor], Tensor]


def results(function: Function, x: Tensor, weights: Tensor) -> list[Tensor]:
    out = function(x)
    return [out, *torch.autograd.grad(out, x, weights.to(out.dtype))]


def check(ours: Function, plain: Function, x: Tensor, compiles: bool) -> None:
    """At most twice the error of torch's own kernels in the same format, which round as often."""
    torch._dynamo.reset()
    given = x.detach().requires_grad_()
    exact = given.detach().double().requires_grad_()
    weights = torch.randn_like(plain(given).float())
    function = torch.compile(ours, fullgraph=True, dynamic=False) if compiles else ours
    for mine, theirs, expected in zip(
        results(function, given, weights),
        results(plain, given, weights),
        results(plain, exact, weights),
        strict=True,
    ):
        error, allowed = (torch.linalg.vector_norm(part.double() - expected) for part in (mine, theirs))
        smallest = 4 * torch.finfo(torch.float32).eps * torch.linalg.vector_norm(expected)
        assert error <= 2 * allowed + smallest


@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (700, 1000), (4096, 8192)])
def test_swiglu(rows: int, inner: int, dtype: torch.dtype, compiles: bool) -> None:
    from megatron_zpp.model.fused.swiglu import swiglu as fused

    x = 3 * torch.randn(2, rows, 2 * inner, device="cuda")
    check(fused, swiglu, x.to(dtype), compiles)


@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
@pytest.mark.parametrize(
    ("heads", "groups", "width", "rotated", "shared"),
    [(32, 8, 64, 64, True), (24, 8, 128, 128, False), (3, 1, 40, 20, True), (70, 7, 8, 6, False)],
)
def test_rotation(
    heads: int, groups: int, width: int, rotated: int, shared: bool, dtype: torch.dtype, compiles: bool
) -> None:
    """Of texts with the same positions, or each with its own."""
    from megatron_zpp.model.fused.rotary import rotate_heads

    positions = torch.arange(300)[None] if shared else torch.randint(300, (2, 300))
    found = RotaryEmbedding(rotated, 1e4).rotation(positions.cuda())

    def ours(x: Tensor) -> Tensor:
        return torch.cat(rotate_heads(x, heads, groups, width, found), 2)

    def plain(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (-1, width)).split([heads, groups, groups], 2)
        rotation = (
            Rotation(found.cos.to(x.dtype), found.sin.to(x.dtype)) if x.dtype == torch.double else found
        )
        return torch.cat([rotation(q), rotation(k), v], 2)

    x = torch.randn(2, 300, (heads + 2 * groups) * width, device="cuda")
    check(ours, plain, x.to(dtype), compiles)


def test_gates_of_any_size() -> None:
    """Where the sigmoid is 0 or 1, and what is not finite stays so."""
    from megatron_zpp.model.fused.swiglu import swiglu as fused

    gates = torch.tensor([-torch.inf, -1e30, -300.0, -100.0, -90.0, 0.0, 90.0, 300.0, 1e30, torch.nan])
    x = torch.stack([gates, torch.full_like(gates, 2.0)]).flatten()[None, None].cuda().requires_grad_()
    ones = torch.ones(1, 1, len(gates), device="cuda")
    for ours, theirs in zip(results(fused, x, ones), results(swiglu, x, ones), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)
