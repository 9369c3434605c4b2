"""--fused-backend apex against torch's norms and the project's AdamW; skipped where apex is not built."""

import dataclasses

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.model.build import norm_classes
from megatron_zpp.model.layer import TORCH_NORMS
from tests.gpu.test_training import VOCAB, losses_on
from tests.model.variants import MODELS, NO_DROPOUT
from tests.zero.engines import engine_of, weights_of

pytest.importorskip("amp_C", reason="apex is not built; README.md says how")
pytest.importorskip("fused_layer_norm_cuda", reason="apex is not built; README.md says how")

SHAPE = {"num_layers": 3, "hidden_size": 320, "num_attention_heads": 4, "seq_length": 128}
MODEL = ModelConfig(**SHAPE, **NO_DROPOUT)


def train(backend: str, stage: int, precision: PrecisionConfig, model: str) -> list[float]:
    config, zero = dataclasses.replace(MODEL, **MODELS[model]), ZeroConfig(zero_stage=stage)
    return losses_on("cuda", precision, config, zero=zero, fused_backend=backend)


@pytest.mark.parametrize(
    ("precision", "rounding"),
    [
        (PrecisionConfig(fp32=True), 1e-5),  # sums of norms in another order, over ten steps
        (PrecisionConfig(bf16=True), 2 * torch.finfo(torch.bfloat16).eps),
        (PrecisionConfig(fp16=True, loss_scale=1024.0), 2 * torch.finfo(torch.float16).eps),
    ],
)
@pytest.mark.parametrize(("stage", "model"), [(0, "llama"), (1, "gpt2"), (2, "llama"), (3, "gpt2")])
def test_steps_agree_with_the_other_backend(
    stage: int, model: str, precision: PrecisionConfig, rounding: float
) -> None:
    expected = train("torch", stage, precision, model)
    assert train("apex", stage, precision, model) == pytest.approx(expected, rel=rounding)


def test_a_step_that_overflows_changes_nothing() -> None:
    overflowing = PrecisionConfig(fp16=True, loss_scale=2.0**40)
    engine = engine_of(MODEL, VOCAB, precision=overflowing, device="cuda", fused_backend="apex")
    before = {name: weight.clone() for name, weight in weights_of(engine).items()}
    engine.accumulate(torch.randint(VOCAB, (4, 129)), index=0, micro_batches=1)
    assert engine.step(1e-3).skipped.item() == 1
    after = weights_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", TORCH_NORMS)
@pytest.mark.parametrize("width", [64, 1000])
def test_norms_follow_float64(kind: str, width: int) -> None:
    """Of hidden states, and of heads, which are not contiguous."""
    torch.manual_seed(4)
    hidden = torch.randn(64, 3 * width, device="cuda").mul_(3).requires_grad_()
    norm = norm_classes("apex")[kind](width, eps=1e-5).cuda()
    exact = TORCH_NORMS[kind](width, eps=1e-5).cuda().double()
    for (name, parameter), other in zip(norm.named_parameters(), exact.parameters(), strict=True):
        torch.nn.init.normal_(parameter, float(name == "weight"), 0.1)
        other.data.copy_(parameter)
    wide = hidden.detach().double().requires_grad_()
    found, expected = norm(hidden[:, width : 2 * width]), exact(wide[:, width : 2 * width])
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    for parameter, other in zip(norm.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=1e-5, atol=1e-4)
