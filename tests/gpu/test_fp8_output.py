"""The output layer's products of 8-bit floats, and the loss's codes of its gradient."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.model.fp8.cast import factors_of
from megatron_zpp.model.fp8.output import OutputProduct, part_rows
from megatron_zpp.model.loss import CODE_UNIT, IGNORED, PLAIN, Objective, linear_cross_entropy
from megatron_zpp.model.loss import logits_to_gradient as plain_gradient
from megatron_zpp.plan.activations import loss_bytes
from tests.gpu.steady import waits_are_errors
from tests.gpu.test_fp8 import DELAYED, HELD, check_steady, engine_of, losses_of, needs_fp8, next_codes
from tests.model.variants import MODELS, flags_of
from tests.plan.jobs import job_of

OUTPUT = "--fp8-output-layer"


@needs_fp8
@pytest.mark.parametrize(
    ("tokens", "entries", "objective", "others"),
    [
        (16, 1008, Objective(1001), 0),
        (16, 1008, Objective(1001, cap=5.0, z_coeff=0.01), 0),
        (80, 272, Objective(272), 32),
        (4112, 50304, Objective(50257), 0),
        (4112, 50304, Objective(50257, cap=5.0, z_coeff=0.01), 0),
        (4096, 50304, Objective(50257), 61440),
    ],
)
def test_the_loss_writes_codes_of_its_gradient(
    tokens: int, entries: int, objective: Objective, others: int
) -> None:
    """In both layouts, those of float64; the largest tensor by columns has more than 2^31 elements."""
    from megatron_zpp.model.fp8.kernels.coded_loss import logits_to_codes

    vocab_size = objective.vocab_size
    logits = 3 * torch.randn(tokens, entries, dtype=torch.bfloat16, device="cuda")
    targets = torch.randint(vocab_size, (tokens,), device="cuda")
    targets[1], logits[2, 5], logits[1, 1] = IGNORED, torch.nan, torch.nan  # row 1 does not count
    rows = torch.empty(tokens, entries, dtype=torch.float8_e5m2, device="cuda")
    whole = torch.zeros(entries, others + tokens, dtype=torch.float8_e5m2, device="cuda")
    losses = logits_to_codes(logits, targets, objective, rows, whole[:, others:])
    assert losses.isnan().all()
    assert rows[2, :vocab_size].float().isnan().all()
    assert rows[1].view(torch.uint8).count_nonzero() == 0
    assert torch.equal(whole[:, others:].t().contiguous().view(torch.uint8), rows.view(torch.uint8))
    assert not whole.view(torch.uint8)[:, :others].any()
    counted = torch.arange(tokens, device="cuda") != 1
    logits[2, 5] = 0.0
    found = logits_to_codes(logits, targets, objective, rows, whole[:, others:])
    exact = logits[counted].float()
    expected = plain_gradient(exact, targets[counted], objective)
    torch.testing.assert_close(found, expected, rtol=2.0**-18, atol=0)
    codes = (exact * CODE_UNIT).to(torch.float8_e5m2)
    next_codes(rows[counted], codes)
    assert rows[:, vocab_size:].contiguous().view(torch.uint8).count_nonzero() == 0


def output_layer(tokens: int, width: int, fused: bool) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """What computes loss and gradients by 8-bit products, with scales that are known; those of bf16."""
    from megatron_zpp.model.fp8.kernels.cast import cast
    from megatron_zpp.model.fp8.kernels.coded_loss import logits_to_codes
    from megatron_zpp.model.fused.loss import PASSES

    draw = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, width, generator=draw, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(50304, width, generator=draw, device="cuda").mul_(2 / width**0.5).bfloat16()
    weight.requires_grad_()
    targets = torch.randint(50257, (tokens,), generator=draw, device="cuda")
    targets[5] = IGNORED
    scale = torch.tensor(0.7, device="cuda")
    passes = replace(PASSES, to_codes=logits_to_codes) if fused else PLAIN
    product = OutputProduct(cast).cuda()
    largest = torch.stack((x.abs().amax().float(), weight.abs().amax().float(), scale))
    product.factors = factors_of(448.0 / largest)

    def results(loss: Callable[..., Tensor]) -> list[Tensor]:
        value = loss(x, weight, targets, Objective(50257), passes=passes)
        return [value.detach(), *torch.autograd.grad(value * scale, (x, weight))]

    return lambda: results(product.loss), results(linear_cross_entropy)


@needs_fp8
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(512, 2048), (16384, 2048), (16384, 1024)])
def test_the_output_layer_is_near_that_of_bf16(tokens: int, width: int, fused: bool) -> None:
    """In one part and in two; E4M3 is off by 2^-5 of a number on average at most, E5M2 by 2^-4."""
    assert part_rows(tokens, width) == min(tokens, 8 * width)
    ours, plain = output_layer(tokens, width, fused)
    found = ours()
    assert found[0].item() == pytest.approx(plain[0].item(), abs=0.05)
    for mine, theirs in zip(found[1:], plain[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item() <= 2.0**-4
        along = (mine.float() * theirs.float()).sum() / theirs.float().square().sum()
        assert along.item() == pytest.approx(1.0, abs=2.0**-6)
    assert torch.count_nonzero(found[1][5]) == torch.count_nonzero(found[2][50257:]) == 0
    with waits_are_errors():
        again = ours()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, again, strict=True))


@needs_fp8
@pytest.mark.parametrize(("tokens", "width"), [(16384, 2048), (16384, 1024)])
def test_the_output_layer_takes_the_memory_of_the_plan(tokens: int, width: int) -> None:
    """Within 5%, beside its inputs, of one part and of two."""
    model = ModelConfig(num_layers=1, hidden_size=width, num_attention_heads=8, seq_length=1024)
    precision = PrecisionConfig(bf16=True, fp8=True, fp8_recipe="delayed", fp8_output_layer=True)
    job = replace(job_of(model, 50257, precision=precision, micro_batch_size=tokens // 1024), compiled=True)
    ours, _ = output_layer(tokens, width, fused=True)
    ours()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours()
    assert loss_bytes(job) == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)


def pass_means(losses: list[float]) -> list[float]:
    """The mean loss of each pass over the four batches of `losses_of`."""
    return torch.tensor(losses).view(-1, 4).mean(1).tolist()


@needs_fp8
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("llama", HELD),
        pytest.param("llama", DELAYED, marks=pytest.mark.gpu_long),
        *(pytest.param("gpt2", recipe, marks=pytest.mark.gpu_long) for recipe in (DELAYED, HELD)),
    ],
)
def test_an_output_layer_in_8_bits_learns_alike_and_a_step_does_not_wait(
    model: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the mean of each pass over the four batches: within a tenth of what bf16's loss falls by.

    A single loss says less: steps at this learning rate amplify roundings, so that the loss of one batch may
    be off by more than that in one step, and in the other direction in the next.
    """
    more = flags_of(MODELS[model])
    plain = losses_of(engine_of("", *more))
    capsys.readouterr()
    engine = engine_of(f"{recipe} {OUTPUT}", *more)
    ours = losses_of(engine)
    assert "compiles a layer again" not in capsys.readouterr().err
    assert pass_means(ours) == pytest.approx(pass_means(plain), abs=(plain[0] - plain[-1]) / 10)
    assert ours != losses_of(engine_of(recipe, *more))
    check_steady(engine)
    engine.close()


@needs_fp8
def test_an_output_layer_in_8_bits_has_the_same_bits_at_every_stage() -> None:
    """Of one rank; compiled or not, kernels of the loss round alike but next to ties.

    Layers that are held as codes take half the memory of bf16 in their slots.
    """
    found = []
    for more in (["--zero-stage", "0"], ["--zero-stage", "2"], ["--zero-stage", "3"], ["--no-compile"]):
        engine = engine_of(f"{HELD} {OUTPUT}", *more)
        found.append(losses_of(engine))
        assert all(unit.full.nbytes == unit.layout.numel for unit in engine.units[1:-1])
        engine.close()
    assert found[0] == found[1] == found[2]
    assert found[3] == pytest.approx(found[0], rel=2.0**-5)
