"""Each function with a backward of its own has the gradients of its plain run when it is compiled.

A compiler that loses one says nothing. So torch 2.11 does where what a forward returns is also the result of
another operation: of a cast to the format that it has, or of one that writes in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Axis
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.context.heads import Exchange
from megatron_zpp.model.context.ring import Ring
from megatron_zpp.model.fp8.cast import factors_of
from megatron_zpp.model.fp8.delayed import CodedInput, DelayedProduct
from megatron_zpp.model.fp8.tensorwise import float8_linear
from megatron_zpp.model.parallel.exchanges import Gather, GatheredLinear, LinearScattered, ScatterSum
from megatron_zpp.model.parallel.norm import NormAcrossRanks
from megatron_zpp.model.scores import Scores
from megatron_zpp.placement import Split
from tests.support import nightly
from tests.zero.ranks import on_ranks

RANKS, ROWS, WIDTH = 2, 16, 32
CODES = torch.ones(WIDTH, WIDTH).to(torch.float8_e4m3fn)
Cases = dict[str, tuple[Callable[..., Tensor], list[Tensor]]]


def functions(group: TensorGroup, dtype: torch.dtype) -> Cases:
    """Functions of tensors, and tensors whose gradients they have."""
    draw = torch.Generator().manual_seed(group.rank)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype).requires_grad_()

    def product(known: bool) -> DelayedProduct:
        made = DelayedProduct()
        made.factors = factors_of(torch.tensor([64.0, 64.0, 64.0])) if known else None
        return made

    def of_codes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return coded(CodedInput(x, CODES[:ROWS], CODES[:, :ROWS]), weight, bias)

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return ring(q, k, v, 0.0, ring.mask(q, None, None), Scores(sinks=sinks))

    def linear(bias: bool = True) -> list[Tensor]:
        return [drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), *[drawn(WIDTH)] * bias]

    known, coded, held, ring = product(True), product(True), product(True), Ring(DotProduct(), group)
    held.codes = CODES
    made: Cases = {
        "gather": (lambda x: Gather.apply(x, group), [drawn(ROWS, WIDTH)]),
        "scatter_sum": (lambda x: ScatterSum.apply(x, group), [drawn(RANKS * ROWS, WIDTH)]),
        "exchange": (lambda x: Exchange.apply(group, True, x)[0], [drawn(1, ROWS, 2 * RANKS, 8)]),
        "ring": (attention, [*(drawn(1, 2 * ROWS, 2, 8) for _ in range(3)), drawn(2)]),
        "tensorwise": (float8_linear, linear()),
        "delayed, of the first step": (product(False), linear()),
        "delayed": (known, linear()),
        "delayed, of codes": (of_codes, linear()),
        "delayed, held as codes": (partial(held, bias=None), linear(bias=False)),
    }
    for overlapped in (False, True):
        gathered = partial(_apply, GatheredLinear, overlapped, group)
        scattered = partial(_apply, LinearScattered, overlapped, group)
        shares = [drawn(RANKS * ROWS, WIDTH // RANKS), drawn(WIDTH, WIDTH // RANKS)]
        made[f"gathered_linear, {overlapped=}"] = gathered, linear()
        made[f"linear_scattered, {overlapped=}"] = scattered, shares
    split = Split(0, (RANKS * WIDTH,), Axis(1, RANKS))
    for kind in (nn.LayerNorm, nn.RMSNorm):
        norm = NormAcrossRanks(kind(RANKS * WIDTH, eps=1e-5), split, group).to(dtype)
        for parameter in norm.parameters():
            nn.init.ones_(parameter)
        made[kind.__name__] = (lambda x, *_, norm=norm: norm(x)), [drawn(ROWS, WIDTH), *norm.parameters()]
    return made


def _apply(function: Any, overlapped: bool, group: TensorGroup, *given: Tensor) -> Tensor:
    return function.apply(*given, overlapped, group)


def lost(topology: Topology, backend: str, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Functions and places of gradients that are zero, or different if one graph computes all functions."""
    torch._dynamo.reset()
    made = functions(TensorGroup(range(RANKS), topology.rank), dtype)
    inputs = [(name, place, each) for name, (_, given) in made.items() for place, each in enumerate(given)]

    def outputs() -> list[Tensor]:
        return [function(2 * given[0], *given[1:]) for function, given in made.values()]

    def gradients(compute: Callable[[], list[Tensor]]) -> tuple[Tensor, ...]:
        found = compute()
        weights = [torch.arange(out.numel()).cos().to(out.dtype).view(out.shape) for out in found]
        for each in weights:
            each[..., : each.shape[-1] // 2] = 0  # so some gradients are zeros
        return torch.autograd.grad(found, [each for *_, each in inputs], weights)

    def same(ours: Tensor, theirs: Tensor) -> bool:
        if backend == "aot_eager":
            return torch.equal(ours, theirs)
        size = theirs.abs().max()
        return bool((ours - theirs).abs().max() <= 64 * torch.finfo(dtype).eps * size)

    plain, compiled = map(gradients, (outputs, torch.compile(outputs, backend=backend, fullgraph=True)))
    pairs = zip(inputs, compiled, plain, strict=True)
    return [each[:2] for each, ours, theirs in pairs if not theirs.any() or not same(ours, theirs)]


@pytest.mark.parametrize("dtype", [torch.float32, nightly(torch.bfloat16)])
@pytest.mark.parametrize("backend", ["aot_eager", nightly("inductor")])
def test_a_graph_loses_no_gradient(backend: str, dtype: torch.dtype) -> None:
    assert on_ranks(RANKS, lost, backend, dtype) == [[]] * RANKS
