"""Products of 8-bit floats by the GPU's own units, whose fast sums keep 13 bits of the fraction."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.fp8.cast import GRADIENT, INPUT, WEIGHT, factors_of, plain_cast
from megatron_zpp.model.fp8.delayed import DelayedLinear
from megatron_zpp.model.fp8.tensorwise import Float8Linear
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu import steady
from tests.model.test_fp8 import check_products
from tests.model.variants import GEMMA, MODELS, flags_of

DELAYED = "--fp8 --fp8-recipe delayed"
HELD = f"{DELAYED} --fp8-param-gather"
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not CAPABLE, reason="needs a GPU of compute capability 8.9")


@needs_fp8
@pytest.mark.parametrize(("rows", "inner", "outer"), [(64, 32, 48), (256, 1024, 512), (4096, 2048, 2048)])
def test_products_are_within_what_the_codes_allow(rows: int, inner: int, outer: int) -> None:
    """With scales of each tensor, and with delayed ones."""
    from megatron_zpp.model.fp8.kernels.cast import cast

    for kind in (Float8Linear, partial(DelayedLinear, cast=cast)):
        check_products(rows, inner, outer, torch.bfloat16, "cuda", fast=2.0**-13, kind=kind)


@needs_fp8
@pytest.mark.parametrize("kind", [INPUT, GRADIENT])
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (80, 144), (4096, 2064), (65552, 32784)])
def test_casts_write_the_oracles_codes(kind: int, rows: int, width: int) -> None:
    """In both layouts, bit for bit; the largest tensor has more than 2^31 elements."""
    from megatron_zpp.model.fp8.kernels.cast import cast

    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    x *= 2.0 ** torch.randint(-20, 20, (1, width), device="cuda")
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    factors = factors_of(torch.full((3,), 3.0, device="cuda"))
    found, expected = torch.zeros(2, 3, device="cuda")
    by_rows, by_columns = cast(x, factors, found, kind, rows=True, columns=True)
    for first in range(0, rows, 8192):  # the oracle takes several times the memory
        part = slice(first, first + 8192)
        codes, _ = plain_cast(x[part], factors, expected, kind, rows=True, columns=False)
        same_codes(by_rows[part], codes)
        same_codes(by_columns[:, part].t(), codes)
    assert torch.equal(found, expected)


@needs_fp8
@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize(("rows", "widths"), [(80, (144,)), (80, (144, 48, 48)), (4096, (2064, 2064, 2064))])
def test_gradients_are_joined_as_codes(rows: int, widths: tuple[int, ...], with_sums: bool) -> None:
    """In both layouts, bit for bit; and their sums over rows."""
    from megatron_zpp.model.fp8.kernels.cast import cast_gradients

    joined = torch.randn(rows, sum(widths), dtype=torch.bfloat16, device="cuda")
    factors = factors_of(torch.full((3,), 1000.0, device="cuda"))
    found, expected = torch.zeros(2, 3, device="cuda")
    by_rows, by_columns, sums = cast_gradients(joined.split(widths, 1), factors, found, sums=with_sums)
    codes, _ = plain_cast(joined, factors, expected, GRADIENT, rows=True, columns=False)
    same_codes(by_rows, codes)
    same_codes(by_columns.t(), codes)
    assert torch.equal(found, expected)
    if with_sums:
        wide = joined.double()
        assert ((sums - wide.sum(0)).abs() <= rows * 2.0**-24 * wide.abs().sum(0)).all()


def same_codes(found: Tensor, expected: Tensor) -> None:
    unlike = found.contiguous().view(torch.uint8) != expected.view(torch.uint8)
    assert not (unlike & ~(found.float().isnan() & expected.float().isnan())).any()


def next_codes(found: Tensor, expected: Tensor) -> None:
    """At most the next code, for few elements: kernels differ in the last bit of what they round.

    Where terms of a derivative cancel, that bit of the terms is several codes.
    """
    steps = found.contiguous().view(torch.uint8).int() - expected.contiguous().view(torch.uint8).int()
    signs = found.float().sign() * expected.float().sign()
    wide = expected.float()
    cancelled = (found.float() - wide).abs() <= 2.0**-18 * wide.abs().max()
    assert ((steps.abs() <= 1) | (signs <= 0) | cancelled).all()
    assert (steps != 0).float().mean() < 2.0**-6


@needs_fp8
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(80, 144), (4096, 2064)])
def test_activations_write_codes(gated: bool, biased: bool, rows: int, width: int) -> None:
    """In both layouts, those of what torch computes; and the sums of the bias."""
    from megatron_zpp.model.fp8.kernels.coded_activation import coded_activation, coded_activation_backward
    from megatron_zpp.model.layer import gelu, swiglu

    outer = 2 * width if gated else width
    x = torch.randn(rows, outer, dtype=torch.bfloat16, device="cuda")
    of_out = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(outer, dtype=torch.bfloat16, device="cuda") if biased else None
    shifted = (x if bias is None else x + bias).float().requires_grad_()
    out = (swiglu if gated else gelu)(shifted)
    (gradient,) = torch.autograd.grad(out, shifted, of_out.float())
    factors = factors_of(torch.full((3,), 30.0, device="cuda"))
    for kind, number, found in (
        (INPUT, out.detach(), coded_activation(x, bias, factors, torch.zeros(3, device="cuda"), gated, True)),
        (
            GRADIENT,
            gradient,
            coded_activation_backward(of_out, x, bias, factors, torch.zeros(3, device="cuda"), gated),
        ),
    ):
        codes, _ = plain_cast(number, factors, torch.zeros(3, device="cuda"), kind, rows=True, columns=False)
        next_codes(found[0], codes)
        same_codes(found[1].t(), found[0])
    if biased:
        sums = coded_activation_backward(of_out, x, bias, factors, torch.zeros(3, device="cuda"), gated)[2]
        wide = gradient.double()
        assert ((sums - wide.sum(0)).abs() <= wide.abs().sum(0) * 2.0**-16).all()


@needs_fp8
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(("rows", "width"), [(80, 144), (4096, 2064), (1024, 12288)])
def test_norms_write_codes(kind: type[nn.LayerNorm | nn.RMSNorm], rows: int, width: int) -> None:
    """In both layouts, those of what torch computes, after a residual sum and without."""
    from megatron_zpp.model.fp8.kernels.coded_norm import _coded_norm

    x, added = torch.randn(2, rows, width, dtype=torch.bfloat16, device="cuda")
    module = kind(width, eps=1e-5, device="cuda", dtype=torch.bfloat16)
    factors = factors_of(torch.full((3,), 60.0, device="cuda"))
    maxima = torch.zeros(3, device="cuda")
    for summand in (None, added):
        bias = module.bias if isinstance(module, nn.LayerNorm) else None
        found = _coded_norm(x, summand, module.weight, bias, 1e-5, 0.0, factors, maxima, True)
        total = x if summand is None else x + summand
        normed = module.float()(total.float())
        module.bfloat16()
        codes, _ = plain_cast(normed.detach(), factors, maxima, INPUT, rows=True, columns=False)
        next_codes(found[3], codes)
        same_codes(found[4].t(), found[3])
        if summand is not None:
            assert torch.equal(found[0], total)


@needs_fp8
@pytest.mark.parametrize("count", [256, 100 * 256, (1 << 31) + 512])
def test_held_weights_have_the_oracles_codes(count: int) -> None:
    """Written in parts; the largest has more than 2^31 elements."""
    from megatron_zpp.model.fp8.kernels.weight_codes import encode_weights

    x = torch.randn(count, device="cuda")
    x *= 2.0 ** torch.randint(-20, 20, (1,), device="cuda")
    x[-3:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    factors = factors_of(torch.full((3,), 3.0, device="cuda"))
    found, expected = torch.zeros(2, 3, device="cuda")
    codes = torch.zeros(count, dtype=torch.float8_e4m3fn, device="cuda")
    for part, room in zip(*(each.tensor_split((count // 512 * 256,)) for each in (x, codes)), strict=True):
        if len(part):
            encode_weights(part, room, factors, found)
    for first in range(0, count, 1 << 28):
        part = slice(first, first + (1 << 28))
        oracle, _ = plain_cast(x[None, part], factors, expected, WEIGHT, rows=True, columns=False)
        same_codes(codes[None, part], oracle)
    assert torch.equal(found, expected)


@needs_fp8
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (80, 144), (4096, 2064), (65552, 32784)])
def test_held_weights_are_transposed(outputs: int, inputs: int) -> None:
    """Byte for byte; the largest has more than 2^31 elements."""
    from megatron_zpp.model.fp8.kernels.weight_codes import transpose

    codes = torch.randint(256, (outputs, inputs), dtype=torch.uint8, device="cuda")
    turned = transpose(codes.view(torch.float8_e4m3fn), codes)
    assert turned.dtype == torch.float8_e4m3fn
    assert torch.equal(turned.view(torch.uint8).t(), codes)


def engine_of(recipe: str, *more: str) -> ZeroEngine:
    """Four layers as a run builds them, compiled by default."""
    torch._dynamo.reset()
    flags = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 256 "
        "--num-attention-heads 4 --seq-length 128 --micro-batch-size 8 --train-iters 30 --lr 1e-3 --bf16 "
        "--hidden-dropout 0 --attention-dropout 0"
    )
    config = parse_args([*flags.split(), *recipe.split(), *more])
    return build_engine(config, 1001, prepare_device(config, Topology()), Topology())


def losses_of(engine: ZeroEngine) -> list[float]:
    data = torch.randint(1000, (4, 8, 129), generator=torch.Generator().manual_seed(8))
    return steady.losses_of(engine, data.repeat(6, 1, 1)[:, None])


def check_steady(engine: ZeroEngine) -> None:
    tokens = torch.randint(1000, (8, 129), device="cuda")
    steady.assert_steady(lambda: steady.step_of(engine, tokens), warmup=3)


@needs_fp8
@pytest.mark.parametrize(
    "model", ["gpt2", *(pytest.param(name, marks=pytest.mark.gpu_long) for name in ("llama", "gemma"))]
)
def test_recipes_learn_alike_and_a_step_does_not_wait(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled; and with delayed scaling the layers are compiled once, after the first step."""
    more = flags_of((MODELS | {"gemma": GEMMA})[model])
    curves = [plain := losses_of(engine_of("", *more))]
    for recipe in ("--fp8", DELAYED, HELD):
        capsys.readouterr()
        engine = engine_of(recipe, *more)
        curves.append(losses_of(engine))
        assert "compiles a layer again" not in capsys.readouterr().err
        near = curves[-2] if recipe == HELD else plain
        assert curves[-1] == pytest.approx(near, abs=(near[0] - near[-1]) / 10)
        assert curves[-1] not in curves[:-1]
        if engine.scaling is not None:
            state = engine.scaling.state()
            assert state is not None
            assert all(scale != 1.0 for entry in state.values() for scale in entry["scales"])
            check_steady(engine)
        if recipe == HELD:
            check_held_codes(engine)
        engine.close()


def check_held_codes(engine: ZeroEngine) -> None:
    """They are those of the master weights."""
    factors = {
        name: module.product.factors
        for name, module in engine.model.named_modules()
        if isinstance(module, DelayedLinear)
    }
    for unit in engine.units[1:-1]:
        for name, master in zip(unit.names, unit.views(unit.master), strict=True):
            linear = name.removesuffix(".weight")
            if linear in factors:
                found, maxima = factors[linear], torch.zeros(3, device="cuda")
                codes, _ = plain_cast(master, found, maxima, WEIGHT, rows=True, columns=False)
                same_codes(engine.model.get_submodule(linear).product.codes, codes)


@needs_fp8
@pytest.mark.gpu_long
def test_recomputed_layers_have_the_same_codes() -> None:
    recompute = "--recompute-granularity full --recompute-method uniform".split()
    for recipe in (DELAYED, HELD):
        stored, recomputed = (losses_of(engine_of(recipe, *more)) for more in ((), recompute))
        assert recomputed == stored
