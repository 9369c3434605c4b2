"""The kernels of compiled layers against float64, as they are and inside a graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.layer import WideLayerNorm, WideRMSNorm, geglu, swiglu
from megatron_zpp.model.rotary import RotaryEmbedding, Rotation, positions_per_radian

Norm = nn.LayerNorm | nn.RMSNorm
Given = tuple[list[Tensor], list[nn.Module]]  # tensors that get gradients, and modules
HEADS = 4
# (dtype, compiles); a graph is compiled anew for each format and size
FORMATS = [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    pytest.param(torch.float32, True, marks=pytest.mark.gpu_long),
    pytest.param(torch.float16, True, marks=pytest.mark.gpu_long),
]


def results(function: Callable[..., list[Tensor]], given: Given, weights: list[Tensor]) -> list[Tensor]:
    """What it returns, and all gradients."""
    tensors, modules = given
    out = function(*tensors, *modules)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    upstream = [weight.to(part.dtype) for weight, part in zip(weights, out, strict=True)]
    return [*out, *torch.autograd.grad(out, [*tensors, *parameters], upstream)]


def check(
    ours: Callable[..., list[Tensor]],
    plain: Callable[..., list[Tensor]],
    given: Given,
    compiles: bool,
    roundings: int = 4,
) -> None:
    """At most twice the error of torch's own kernels in the same format, which round as often."""
    torch._dynamo.reset()
    tensors, modules = given
    wide = [part.detach().double().requires_grad_() for part in tensors]
    exact = wide, [copy.deepcopy(module).double() for module in modules]
    draw = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(part.shape, generator=draw, device="cuda") for part in plain(*tensors, *modules)]
    function = torch.compile(ours, fullgraph=True, dynamic=False) if compiles else ours
    found, theirs = results(function, given, weights), results(plain, given, weights)
    for mine, other, expected in zip(found, theirs, results(plain, exact, weights), strict=True):
        error, allowed = (torch.linalg.vector_norm(part.double() - expected) for part in (mine, other))
        smallest = roundings * torch.finfo(torch.float32).eps * torch.linalg.vector_norm(expected)
        assert error <= 2 * allowed + smallest


def maps_of(rows: int, width: int, dtype: torch.dtype) -> Given:
    """x (1, R, W), a map to heads and one into an MLP."""
    draw = torch.Generator("cuda").manual_seed(width)
    x = torch.randn(1, rows, width, generator=draw, device="cuda")
    maps = [nn.Linear(width, columns, device="cuda") for columns in (3 * width, 4 * width - 8)]
    for module in maps:
        module.weight.data.normal_(0, 2 / width**0.5, generator=draw)
        module.bias.data.normal_(0, 0.5, generator=draw)
    return [x.to(dtype).requires_grad_()], [module.to(dtype) for module in maps]


def fused_linear(x: Tensor, to_heads: nn.Linear, into: nn.Linear) -> list[Tensor]:
    from megatron_zpp.model.fused.linear import gelu_of_linear, heads_of_linear

    q, k, v = heads_of_linear(x, to_heads, HEADS, x.shape[-1] // HEADS)
    return [q, k, v, gelu_of_linear(x, into)]


def plain_linear(x: Tensor, to_heads: nn.Linear, into: nn.Linear) -> list[Tensor]:
    q, k, v = to_heads(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
    return [q, k, v, F.gelu(into(x), approximate="tanh")]


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (700, 200), (4096, 1024), (300, 2560)])
@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
def test_heads_and_gelu(rows: int, width: int, dtype: torch.dtype, compiles: bool) -> None:
    """With the gradients of their maps' biases."""
    check(fused_linear, plain_linear, maps_of(rows, width, dtype), compiles)


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


def centred_norm(*shape: int, **options: Any) -> nn.Module:
    norm: Any = WideRMSNorm(*shape, **options)
    norm.offset = 1.0
    return norm


def norms_of(
    rows: int, width: int, dtype: torch.dtype, kind: Callable[..., nn.Module] = nn.LayerNorm
) -> Given:
    """x, what is added to it, two biases, and two norms; rows of a mean far from zero among them.

    Wide norms have x in fp32, and so may those with weights around 0.
    """
    draw = torch.Generator("cuda").manual_seed(width)
    x, added = torch.randn(2, rows, width, generator=draw, device="cuda")
    x[::3] += 5.0
    norms = [kind(width, eps=1e-5, device="cuda") for _ in range(2)]
    for parameter in (parameter for module in norms for parameter in module.parameters()):
        parameter.data += 0.2 * torch.randn(width, generator=draw, device="cuda")
    biases = torch.randn(2, width, generator=draw, device="cuda")
    narrow = [part.to(dtype) for part in (added, *biases)]
    wide = isinstance(norms[0], WideLayerNorm | WideRMSNorm)
    tensors = [x if wide else x.to(dtype), *narrow]
    return [part.requires_grad_() for part in tensors], [module.to(dtype) for module in norms]


def fused_norm(
    x: Tensor, added: Tensor, before: Tensor, after: Tensor, first: Norm, second: Norm
) -> list[Tensor]:
    from megatron_zpp.model.fused.norm import norm

    token, normed = norm(x, first)
    total, again = norm(x, second, added * normed + before.detach(), token, before, after)
    return [torch.stack((normed, total + after.detach(), again))]


def without_biases(x: Tensor, added: Tensor, before: Tensor, after: Tensor, *norms: Norm) -> list[Tensor]:
    from megatron_zpp.model.fused.norm import norm

    token, normed = norm(x, norms[0])
    total, again = norm(x, norms[1], added * normed + before, token)
    return [torch.stack((normed, total + after, again))]


def around_halves(x: Tensor, added: Tensor, before: Tensor, after: Tensor, *norms: Norm) -> list[Tensor]:
    """Of a model whose halves have a norm before them and one behind."""
    from megatron_zpp.model.fused.norm import add_normed, norm

    token, normed = norm(x, norms[0])
    total = add_normed(x, added * normed + before, token, norms[1])
    return [
        torch.stack((normed, total + after, add_normed(after + torch.zeros_like(x), normed, None, norms[1])))
    ]


def plain_around_halves(
    x: Tensor, added: Tensor, before: Tensor, after: Tensor, *norms: Norm
) -> list[Tensor]:
    normed = norms[0](x)
    total = x + norms[1](added * normed + before)
    return [torch.stack((normed, total + after, after + norms[1](normed)))]


def plain_norm(
    x: Tensor, added: Tensor, before: Tensor, after: Tensor, first: Norm, second: Norm
) -> list[Tensor]:
    normed = first(x)
    total = x + (added * normed + before)
    return [torch.stack((normed, total + after, second(total)))]


@pytest.mark.parametrize(
    ("fused", "plain", "kind"),
    [
        *((fused_norm, plain_norm, kind) for kind in (nn.LayerNorm, WideLayerNorm)),
        *((without_biases, plain_norm, kind) for kind in (nn.LayerNorm, nn.RMSNorm, WideRMSNorm)),
        *((around_halves, plain_around_halves, kind) for kind in (nn.LayerNorm, centred_norm)),
    ],
)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (700, 1000), (4096, 2048), (1500, 2560), (300, 12288)])
@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
def test_norms(
    rows: int,
    width: int,
    dtype: torch.dtype,
    fused: Callable[..., list[Tensor]],
    plain: Callable[..., list[Tensor]],
    kind: Callable[..., nn.Module],
    compiles: bool,
) -> None:
    check(fused, plain, norms_of(rows, width, dtype, kind), compiles, roundings=1)


@pytest.mark.parametrize("path", [0, 1, 2])
def test_no_gradient_is_lost_where_only_one_path_is_used(path: int) -> None:
    """The first norm alone, the sum, or the second norm."""
    tensors, norms = norms_of(10, 256, torch.float32)
    wide = [part.detach().double().requires_grad_() for part in tensors]
    exact = wide, [copy.deepcopy(module).double() for module in norms]
    gradients = []
    for function, (given, modules) in ((fused_norm, (tensors, norms)), (plain_norm, exact)):
        wanted = [*given, *modules[0].parameters(), *modules[1].parameters()]
        out = function(*given, *modules)[0][path].square().sum()
        gradients.append(torch.autograd.grad(out, wanted, materialize_grads=True))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (700, 1000), (4096, 8192)])
@pytest.mark.parametrize("plain", [swiglu, geglu])
def test_gates(
    plain: Callable[[Tensor], Tensor], rows: int, inner: int, dtype: torch.dtype, compiles: bool
) -> None:
    from megatron_zpp.model.fused.gates import gated

    draw = torch.Generator("cuda").manual_seed(inner)  # the errors of few elements vary by more than twice
    x = 3 * torch.randn(2, rows, 2 * inner, generator=draw, device="cuda")
    given = [x.to(dtype).requires_grad_()], []
    check(lambda x: [gated(x, plain is geglu)], lambda x: [plain(x)], given, compiles)


@pytest.mark.parametrize(("dtype", "compiles"), FORMATS)
@pytest.mark.parametrize(
    ("heads", "groups", "width", "rotated", "shared"),
    [(32, 8, 64, 64, True), (24, 8, 128, 128, False), (3, 1, 40, 20, True), (70, 7, 8, 6, False)],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(
    heads: int,
    groups: int,
    width: int,
    rotated: int,
    shared: bool,
    interleaved: bool,
    dtype: torch.dtype,
    compiles: bool,
) -> None:
    """Of texts with the same positions, or each with its own; neighbours are multiplied by a factor too."""
    from megatron_zpp.model.fused.rotary import rotate_heads

    positions = torch.arange(300)[None] if shared else torch.randint(300, (2, 300))
    frequencies = 1 / positions_per_radian(rotated, 1e4)
    factor = 1.25 if interleaved else 1.0
    rotary = RotaryEmbedding(frequencies, interleaved=interleaved, attention_factor=factor)
    found = rotary.rotation(positions.cuda())

    def ours(x: Tensor) -> list[Tensor]:
        return [torch.cat(rotate_heads(x, heads, groups, width, found), 2)]

    def plain(x: Tensor) -> list[Tensor]:
        q, k, v = x.unflatten(-1, (-1, width)).split([heads, groups, groups], 2)
        rotation = (
            Rotation(found.cos.to(x.dtype), found.sin.to(x.dtype), interleaved)
            if x.dtype == torch.double
            else found
        )
        return [torch.cat([rotation(q), rotation(k), v], 2)]

    x = torch.randn(2, 300, (heads + 2 * groups) * width, device="cuda")
    check(ours, plain, ([x.to(dtype).requires_grad_()], []), compiles)


def test_gates_of_any_size() -> None:
    """Where the sigmoid is 0 or 1, and what is not finite stays so."""
    from megatron_zpp.model.fused.gates import gated

    gates = torch.tensor([-torch.inf, -1e30, -300.0, -100.0, -90.0, 0.0, 90.0, 300.0, 1e30, torch.nan])
    x = torch.stack([gates, torch.full_like(gates, 2.0)]).flatten()[None, None].cuda().requires_grad_()
    given, ones = ([x], []), [torch.ones(1, 1, len(gates), device="cuda")]
    kinds = (lambda x: gated(x, False)), swiglu
    found, expected = (results(lambda x, kind=kind: [kind(x)], given, ones) for kind in kinds)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)
