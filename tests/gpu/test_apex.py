"""--fused-backend apex against torch's LayerNorm and the project's AdamW; skipped where apex is not built."""

import pytest
import torch
from torch import Tensor

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from tests.zero.engines import engine_of, weights_of

pytest.importorskip("amp_C", reason="apex is not built; README.md says how")
pytest.importorskip("fused_layer_norm_cuda", reason="apex is not built; README.md says how")

VOCAB = 1001
STEPS = 10
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=320,
    num_attention_heads=5,
    seq_length=128,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


def train(backend: str, stage: int, precision: PrecisionConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of STEPS steps of two micro-batches, and the whole master weights after them."""
    engine = engine_of(
        MODEL,
        VOCAB,
        zero=ZeroConfig(zero_stage=stage),
        optimizer=OptimizerConfig(weight_decay=0.1),
        precision=precision,
        device="cuda",
        fused_backend=backend,
    )
    data = torch.randint(VOCAB, (STEPS, 2, 4, 129), generator=torch.Generator().manual_seed(8))
    losses = []
    for step in data:
        parts = [engine.accumulate(part, index=index, micro_batches=2) for index, part in enumerate(step)]
        losses.append(torch.stack(parts).mean().item())
        assert engine.step(1e-3).skipped.item() == 0
    return losses, weights_of(engine)


@pytest.mark.parametrize("stage", range(4))
def test_fp32_steps_agree_with_the_other_backend(stage: int) -> None:
    exact = PrecisionConfig(fp32=True)
    losses, _ = train("apex", stage, exact)
    expected, _ = train("torch", stage, exact)
    assert losses == pytest.approx(expected, rel=1e-5)  # sums of norms in another order, over ten steps


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (PrecisionConfig(bf16=True), torch.bfloat16),
        (PrecisionConfig(fp16=True, loss_scale=1024.0), torch.float16),
    ],
)
def test_16_bit_steps_agree_within_their_rounding(
    stage: int, precision: PrecisionConfig, dtype: torch.dtype
) -> None:
    losses, _ = train("apex", stage, precision)
    expected, _ = train("torch", stage, precision)
    assert losses == pytest.approx(expected, rel=2 * torch.finfo(dtype).eps)


def test_stages_have_the_same_bits() -> None:
    precision = PrecisionConfig(bf16=True)
    losses, weights = train("apex", 0, precision)
    for stage in (1, 2, 3):
        others, other = train("apex", stage, precision)
        assert others == losses
        assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_a_step_that_overflows_changes_nothing() -> None:
    overflowing = PrecisionConfig(fp16=True, loss_scale=2.0**40)
    engine = engine_of(MODEL, VOCAB, precision=overflowing, device="cuda", fused_backend="apex")
    before = {name: weight.clone() for name, weight in weights_of(engine).items()}
    engine.accumulate(torch.randint(VOCAB, (4, 129)), index=0, micro_batches=1)
    assert engine.step(1e-3).skipped.item() == 1
    after = weights_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_layer_norm_follows_float64() -> None:
    from apex.normalization import FusedLayerNorm

    torch.manual_seed(4)
    hidden = torch.randn(64, 1000, device="cuda").mul_(3).requires_grad_()
    norm = FusedLayerNorm(1000, eps=1e-5).cuda()
    torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    torch.nn.init.normal_(norm.bias, 0.0, 0.1)
    wide = hidden.detach().double().requires_grad_()
    expected = torch.nn.functional.layer_norm(
        wide, (1000,), norm.weight.detach().double(), norm.bias.detach().double(), 1e-5
    )
    upstream = torch.randn_like(hidden)
    norm(hidden).backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(norm(hidden).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
