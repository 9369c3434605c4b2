"""Products by every algorithm that cuBLASLt names, against float64, and a choice that is kept."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_zpp.model.products import ChosenLinear, LinearAlgorithms, ProductShape, own_product
from megatron_zpp.native.cache import cache_directory
from megatron_zpp.ops.library import load_kernels
from megatron_zpp.ops.products import algorithms, cublaslt_version, multiply
from megatron_zpp.train.time_products import ProductTimer, Timings
from tests.support import pretrain

SIZES = [(8, 8, 8), (16, 24, 40), (1000, 8, 2048), (8, 3000, 64), (504, 1144, 8), (2048, 6144, 1024)]
LAYOUTS = list(product((False, True), repeat=2))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels("cuda", print)


def factors(shape: ProductShape) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normal numbers whose sums are about as large as they are."""
    draw = torch.Generator("cuda").manual_seed(shape.m + shape.n + shape.k)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw, device="cuda")

    left = normal(*((shape.k, shape.m) if shape.left_transposed else (shape.m, shape.k)))
    right = normal(*((shape.n, shape.k) if shape.right_transposed else (shape.k, shape.n))) / shape.k**0.5
    bias = normal(shape.n).to(shape.dtype) if shape.bias else None
    return left.to(shape.dtype), right.to(shape.dtype), bias


def bound(left: Tensor, right: Tensor, bias: Tensor | None, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit of the result's rounding, and the fp32 roundings of k sums of the products' magnitudes."""
    k = left.shape[1]
    magnitudes = left.double().abs() @ right.double().abs()
    if bias is not None:
        magnitudes += bias.double().abs()
    sums = (k + 1) * torch.finfo(torch.float32).eps * magnitudes
    tiny = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps / 2 * (exact.abs() + sums) + sums + tiny


def cases() -> Iterator[ProductShape]:
    for (m, n, k), (left, right), bias in product(SIZES, LAYOUTS, (False, True)):
        yield ProductShape(torch.bfloat16, m, n, k, left, right, bias)
    yield ProductShape(torch.float16, 1000, 8, 2048, False, True, True)
    yield ProductShape(torch.float16, 504, 1144, 8, True, False, False)


@pytest.mark.parametrize("shape", [*cases()], ids=lambda shape: shape.name)
def test_every_algorithm_is_exact_up_to_the_rounding_of_its_format(shape: ProductShape) -> None:
    left, right, bias = factors(shape)
    names = algorithms(left, right, bias, **shape.transposed)
    assert len(names) == len(set(names)) > 0
    a, b = left.t() if shape.left_transposed else left, right.t() if shape.right_transposed else right
    exact = a.double() @ b.double()
    if bias is not None:
        exact += bias.double()
    allowed = bound(a, b, bias, exact, shape.dtype)
    for name in names:
        out = multiply(left, right, bias, name, **shape.transposed)
        assert out.dtype == shape.dtype
        assert out.is_contiguous()
        assert ((out.double() - exact).abs() <= allowed).all()
        assert torch.equal(multiply(left, right, bias, name, **shape.transposed), out)


def test_factors_may_be_parts_of_wider_rows() -> None:
    wide, right = torch.randn(64, 96, device="cuda").bfloat16(), torch.randn(32, 48, device="cuda").bfloat16()
    left = wide[:, 16:48]
    (name, *_) = algorithms(left, right, None)
    expected = left.float() @ right.float()
    torch.testing.assert_close(multiply(left, right, None, name).float(), expected, rtol=0.01, atol=0.05)


def test_values_that_are_not_finite_survive() -> None:
    left = torch.ones(16, 32, device="cuda", dtype=torch.bfloat16)
    left[0, 0], left[1, 1], left[2, 2] = torch.nan, torch.inf, -torch.inf
    right = torch.ones(32, 8, device="cuda", dtype=torch.bfloat16)
    for name in algorithms(left, right, None):
        out = multiply(left, right, None, name)
        assert out[0].isnan().all()
        assert (out[1] == torch.inf).all()
        assert (out[2] == -torch.inf).all()
        assert (out[3:] == 32).all()


def test_what_no_algorithm_can_compute_is_refused() -> None:
    x = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
    (name, *_) = algorithms(x, x, None)
    for call, message in [
        (lambda: multiply(x.float(), x.float(), None, name), "left must be bfloat16 or float16"),
        (lambda: multiply(x, x, None, "00"), "must be a name of 144 digits, got 2"),
        (lambda: multiply(x, x, None, "x" * 144), "must consist of the digits"),
        (lambda: multiply(x, x, None, "f" * 144), "must need at most 33554432 bytes of workspace"),
        (lambda: multiply(x[:, 1:], x[1:], None, name), "left must begin at a multiple of 16 bytes"),
        (
            lambda: multiply(x, x[:, :15].contiguous(), None, name),
            "rows of right must begin at multiples of 16",
        ),
        (lambda: multiply(x, x.cpu(), None, name), "right must be on the device of left"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert multiply(x[:0], x, None, name).shape == (0, 16)


def chosen_linear(rows: int) -> ChosenLinear:
    """A map, and for each of its products the last algorithm that cuBLASLt names."""
    linear = ChosenLinear(256, 512, multiply=multiply).cuda().bfloat16()
    names = {}
    for kind, shape in linear.product_shapes(rows, torch.bfloat16).items():
        found = algorithms(*factors(shape), **shape.transposed)
        names[kind] = found[-1]
    linear.algorithms = LinearAlgorithms(rows, **names)
    return linear


def gradients(linear: ChosenLinear, x: Tensor, compiled: bool) -> list[Tensor]:
    x = x.detach().requires_grad_()
    function = torch.compile(linear, fullgraph=True, dynamic=False) if compiled else linear
    linear.zero_grad()
    out = function(x)
    (out.float() ** 2).mean().backward()
    found = [out, x.grad, linear.weight.grad, linear.bias.grad]
    return [each.detach().clone() for each in found if each is not None]


def test_a_compiled_map_computes_what_an_eager_one_does_and_torchs_up_to_rounding() -> None:
    x = torch.randn(4, 128, 256, device="cuda").bfloat16()
    linear = chosen_linear(512)
    eager, compiled = gradients(linear, x, False), gradients(linear, x, True)
    assert torch.equal(eager[0], compiled[0])
    linear.algorithms = LinearAlgorithms(512)
    for ours, graph, plain in zip(eager, compiled, gradients(linear, x, False), strict=True):
        scale = plain.float().abs().max().item()
        for each in (ours, graph):
            torch.testing.assert_close(each.float(), plain.float(), rtol=0.02, atol=0.01 * scale)


def test_the_timer_times_torchs_product_and_every_algorithm() -> None:
    timer = ProductTimer(torch.device("cuda", torch.cuda.current_device()))
    shape = ProductShape(torch.bfloat16, 4096, 2048, 2048, False, True, True)
    timings = timer(shape)
    assert isinstance(timings, Timings)
    assert len(timings.algorithms) > 1
    seconds = [timings.own, *timings.algorithms.values()]
    assert all(1e-6 < each < 1 for each in seconds)  # 34 GFLOP: at 1 PFLOP/s 34 microseconds
    left, right, bias = timer.operands(shape)
    assert own_product(left, right, bias, **shape.transposed).shape == (4096, 2048)
    assert cublaslt_version() > 0


FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --bf16 "
    "--gemm-algorithms measured"
).split()


def test_starts_take_the_same_algorithms_and_compute_the_same_bits(tmp_path: Path) -> None:
    cache, save = tmp_path / "cache", str(tmp_path / "save")
    cache.mkdir(mode=0o700)
    for built in cache_directory(os.environ).glob("*.so*"):
        shutil.copy2(built, cache)
    metrics = [tmp_path / f"{name}.jsonl" for name in ("first", "second", "resumed")]
    starts = [
        (["--train-iters", "6"], "(12 measured in"),
        (["--train-iters", "6", "--exit-interval", "3", "--save", save], "(from the cache)"),
        (["--train-iters", "6", "--load", save], "(from the checkpoint)"),
    ]
    for path, (flags, origin) in zip(metrics, starts, strict=True):
        if origin == "(from the checkpoint)":
            for kept in cache.glob("products-*.json"):
                kept.unlink()
        flags += ["--metrics-file", str(path), "--log-interval", "1"]
        done = pretrain(*FLAGS, *flags, MEGATRON_ZPP_CACHE=str(cache))
        assert done.returncode == 0, done.stderr
        assert f"matrix products by measured algorithms {origin}" in done.stdout
    whole, interrupted, resumed = map(_losses, metrics)
    assert len(whole) == 6
    assert whole == interrupted + resumed


def _losses(path: Path) -> list[float]:
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [step["lm_loss"] for step in steps if "lm_loss" in step]
