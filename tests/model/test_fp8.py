"""Products of 8-bit floats: within what the formats allow of a float64 oracle, with gradients and NaN."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.model.build import build_model
from megatron_zpp.model.fp8.matmuls import DelayedMatmuls, TensorwiseMatmuls
from megatron_zpp.model.fp8.scaling import DelayedScaling
from megatron_zpp.model.fp8.tensorwise import Float8Linear
from megatron_zpp.model.matmuls import PLAIN_MATMULS, Matmuls
from tests.model.variants import MODELS, NO_DROPOUT

E4M3, E5M2 = (3, -9, 448.0), (2, -16, 57344.0)  # bits of the fraction, log2 of the least, the largest
FP32 = 2.0**-23
ROUNDING = {torch.float32: FP32, torch.bfloat16: 2.0**-8}


def errors(x: Tensor, kind: tuple[int, int, float]) -> Tensor:
    """How far a code may be from each number: half a step of the fraction, or half of the least code."""
    bits, least, largest = kind
    scale = x.abs().max() / largest
    # the scale and the scaled number are rounded to fp32 before the code is chosen
    return x.abs() * 2.0 ** -(bits + 1) * (1 + 2.0**-20) + scale * 2.0 ** (least - 1)


def bound(
    left: Tensor,
    right: Tensor,
    left_kind: tuple[int, int, float],
    right_kind: tuple[int, int, float],
    dtype: torch.dtype,
    sums: float = FP32,
) -> Tensor:
    """For left @ right, as float64: errors of codes, sums of K products, the rounding of the result."""
    off_left, off_right = errors(left, left_kind), errors(right, right_kind)
    codes = off_left @ right.abs() + left.abs() @ off_right + off_left @ off_right
    magnitude = left.abs() @ right.abs() + codes
    return codes + magnitude * (left.shape[1] * sums + 2.0**-20 + ROUNDING[dtype])


def check_products(
    rows: int,
    inner: int,
    outer: int,
    dtype: torch.dtype,
    device: str = "cpu",
    fast: float = FP32,
    kind: Callable[[int, int], nn.Linear] = Float8Linear,
) -> None:
    """Forward and gradients of one layer; `fast` is the rounding of sums that are told to be fast."""
    draw = torch.Generator().manual_seed(1)
    layer = kind(inner, outer).to(device, dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outer, inner, generator=draw) * 0.02)
        layer.bias.copy_(torch.randn(outer, generator=draw))
    x = (torch.randn(4, rows // 4, inner, generator=draw) * 30).to(device, dtype).requires_grad_()
    gradient = (torch.randn(4, rows // 4, outer, generator=draw) * 1e-4).to(device, dtype)
    out = layer(x)
    out.backward(gradient)
    x64, w64, g64 = (
        t.detach().double().flatten(0, -2) for t in (x, layer.weight, gradient)
    )  # (M, K), (N, K), (M, N)
    plain, allowed = x64 @ w64.t(), bound(x64, w64.t(), E4M3, E4M3, dtype, fast)
    exact = plain + layer.bias.double()
    allowed = allowed + (plain.abs() + allowed + exact.abs()) * ROUNDING[dtype]  # the bias is added after
    assert ((out.double().flatten(0, -2) - exact).abs() <= allowed).all()
    found = x.grad.double().flatten(0, -2)
    assert ((found - g64 @ w64).abs() <= bound(g64, w64, E5M2, E4M3, dtype)).all()
    found = layer.weight.grad.double()
    assert ((found - g64.t() @ x64).abs() <= bound(g64.t(), x64, E5M2, E4M3, dtype)).all()
    assert torch.equal(layer.bias.grad, gradient.flatten(0, -2).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(16, 32, 48), (64, 16, 16)])
def test_products_are_within_what_the_codes_allow(
    rows: int, inner: int, outer: int, dtype: torch.dtype
) -> None:
    check_products(rows, inner, outer, dtype)


def test_what_codes_hold_is_exact() -> None:
    """Powers of two below the largest magnitude, itself one that makes the scale a power of two."""
    draw = torch.Generator().manual_seed(2)
    numbers = 2.0 ** torch.randint(-3, 3, (32, 32), generator=draw)
    numbers[0, 0] = 448 / 2**4
    layer = Float8Linear(32, 32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(numbers)
    assert torch.equal(layer(numbers), numbers @ numbers.t())


def test_zeros_stay_zero_and_what_is_not_finite_is_seen() -> None:
    layer = Float8Linear(16, 16)
    nn.init.zeros_(layer.bias)
    assert torch.equal(layer(torch.zeros(16, 16)), torch.zeros(16, 16))
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(16, 16)
        x[3, 5] = bad
        assert layer(x)[3].isnan().all()
        x = torch.ones(16, 16, requires_grad=True)
        gradient = torch.ones(16, 16)
        gradient[3, 5] = bad
        layer.weight.grad = None
        layer(x).backward(gradient)
        assert not x.grad[3].isfinite().any()
        assert not layer.weight.grad[5].isfinite().any()


def test_frozen_parts_get_no_gradient() -> None:
    layer = Float8Linear(16, 16)
    layer.weight.requires_grad_(False)
    x = torch.randn(16, 16)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


CPU = torch.device("cpu")
DELAYED = PrecisionConfig(bf16=True, fp8=True, fp8_recipe="delayed")
MATMULS: dict[str, Matmuls] = {
    "tensorwise": TensorwiseMatmuls(),
    "delayed": DelayedMatmuls(DELAYED, CPU),
    "output": DelayedMatmuls(dataclasses.replace(DELAYED, fp8_output_layer=True), CPU),
}


RECOMPUTE = {
    None: RecomputeConfig(),
    "selective": RecomputeConfig(recompute_granularity="selective"),
    "full": RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
    "MLP in chunks": RecomputeConfig(mlp_chunks_for_training=2),
}


def losses_of(model: str, recompute: str | None, matmuls: Matmuls, steps: int = 12) -> list[float]:
    """In bf16, on one batch again and again."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16} | NO_DROPOUT
    groups = {"num_query_groups": 1} if model == "llama" else {}
    config = ModelConfig(**shape | MODELS[model] | groups)
    recomputed = RECOMPUTE[recompute]
    gpt = build_model(config, 64, recomputed, matmuls=matmuls).initialize(1).bfloat16()
    scaling = None
    if isinstance(matmuls, DelayedMatmuls):
        scaling = DelayedScaling(gpt, torch.device("cpu"), history=4, algorithm="max")
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(4))
    masters = [parameter.detach().float().requires_grad_() for parameter in gpt.parameters()]
    adamw, losses = torch.optim.AdamW(masters, lr=1e-2), []
    for _ in range(steps):
        if scaling is not None:
            scaling.begin_step()
        loss = gpt(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, gpt.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        adamw.step()
        if scaling is not None:
            scaling.end_step(scaling.maxima(), torch.tensor(0.0))
        with torch.no_grad():
            for master, parameter in zip(masters, gpt.parameters(), strict=True):
                parameter.copy_(master)
    return losses


@pytest.mark.parametrize("model", MODELS)
def test_models_learn_what_a_plain_one_does_and_recomputation_has_the_same_codes(model: str) -> None:
    """All lose most of the loss, at about the same rate."""
    torch.set_num_threads(1)
    curves = [plain := losses_of(model, None, PLAIN_MATMULS)]
    assert plain[-1] < 0.5 * plain[0]
    for matmuls in MATMULS.values():
        ours, in_chunks = losses_of(model, None, matmuls), losses_of(model, "MLP in chunks", matmuls)
        assert ours not in curves
        for losses in (ours, in_chunks):
            assert losses == pytest.approx(plain, abs=(plain[0] - plain[-1]) / 10)
        for granularity in ("full", "selective"):
            assert losses_of(model, granularity, matmuls, 4) == ours[:4]
        curves.append(ours)
