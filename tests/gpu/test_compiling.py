"""Compiled parts on a GPU: one graph for all layers, no wait for the device, and what eager ones learn."""

import pytest
import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.train.compiling import compile_parts
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu.steady import assert_steady
from tests.zero.engines import engine_of

VOCAB, BATCH, LENGTH = 1000, 8, 128
BF16 = PrecisionConfig(bf16=True)
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")


def compiled(
    said: list[str], dropout: float = 0.0, recompute: RecomputeConfig | None = None, stage: int = 0
) -> ZeroEngine:
    """An engine of four layers whose parts are compiled."""
    torch._dynamo.reset()
    engine = plain(dropout, recompute, stage)
    compile_parts(engine.model, (BATCH, LENGTH), said.append, on_gpu=True)
    return engine


def plain(
    dropout: float = 0.0,
    recompute: RecomputeConfig | None = None,
    stage: int = 0,
    precision: PrecisionConfig = BF16,
) -> ZeroEngine:
    config = ModelConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=LENGTH,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    zero = ZeroConfig(zero_stage=stage)
    return engine_of(config, VOCAB, zero=zero, precision=precision, recompute=recompute, device="cuda")


def losses_of(engine: ZeroEngine, steps: int = 20) -> list[float]:
    """Of steps on batches that come back, each between two evaluations."""
    data = torch.randint(VOCAB, (4, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        losses.append(engine.accumulate(data[step % 4], index=0, micro_batches=1).item())
        assert engine.step(1e-3).skipped.item() == 0
        losses.append(engine.evaluate(data[step % 4]).item())
    return losses


def distance(losses: list[float], others: list[float]) -> float:
    return sum(abs(loss - other) for loss, other in zip(losses, others, strict=True)) / len(losses)


def test_compiled_parts_learn_what_eager_ones_do() -> None:
    """Both are off from fp32's by the rounding of bf16, so no more than √2 of that from each other."""
    said: list[str] = []
    exact, eager = losses_of(plain(precision=PrecisionConfig(fp32=True))), losses_of(plain())
    found = losses_of(compiled(said))
    assert distance(found, eager) <= 2**0.5 * distance(eager, exact)
    assert said == []
    assert eager[-1] < 0.9 * eager[0]  # of 6.95 that a guess among the vocabulary loses


def test_recomputation_repeats_the_draws_of_dropout() -> None:
    """To the bit where attention's backward is deterministic, as torch's plain one is."""
    said: list[str] = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        stored = losses_of(compiled(said, dropout=0.1), steps=5)
        assert losses_of(compiled(said, dropout=0.1, recompute=FULL), steps=5) == stored
        assert losses_of(compiled(said, dropout=0.1, stage=3), steps=5) == stored
    assert said == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_steady_step_neither_waits_for_the_device_nor_allocates(stage: int) -> None:
    engine = compiled([], stage=stage)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), device="cuda")

    def step() -> None:
        for index in range(2):
            engine.accumulate(tokens, index=index, micro_batches=2)
        engine.step(1e-3)

    assert_steady(step, warmup=4)
