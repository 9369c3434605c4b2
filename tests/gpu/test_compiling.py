"""Compiled parts on a GPU: one graph for all layers, no wait for the device, and what eager ones learn."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.library import load_operations
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu.steady import assert_steady, step_of
from tests.model import variants
from tests.zero.engines import engine_of

VOCAB, BATCH, LENGTH = 1000, 8, 128
BF16 = PrecisionConfig(bf16=True)
LLAMA = variants.LLAMA | {"num_attention_heads": 6, "kv_channels": 64}
GEMMA = variants.GEMMA | {"num_attention_heads": 6, "kv_channels": 64}
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
IN_CHUNKS = RecomputeConfig(mlp_chunks_for_training=4)


def compiled(
    said: list[str],
    dropout: float = 0.0,
    recompute: RecomputeConfig | None = None,
    stage: int = 0,
    **changes: Any,
) -> ZeroEngine:
    """An engine of four layers whose parts are compiled."""
    torch._dynamo.reset()
    engine = plain(dropout, recompute, stage, **changes)
    compile_parts(engine.model, (BATCH, LENGTH), said.append, on_gpu=True)
    return engine


def plain(
    dropout: float = 0.0,
    recompute: RecomputeConfig | None = None,
    stage: int = 0,
    precision: PrecisionConfig = BF16,
    unit: Literal["layer", "sublayer"] = "layer",
    optimizer: OptimizerConfig | None = None,
    **changes: Any,
) -> ZeroEngine:
    shape = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": LENGTH}
    config = ModelConfig(**shape | changes, hidden_dropout=dropout, attention_dropout=dropout)
    zero = ZeroConfig(zero_stage=stage, zero_unit=unit)
    return engine_of(
        config,
        VOCAB,
        zero=zero,
        precision=precision,
        recompute=recompute,
        optimizer=optimizer,
        operations=load_operations("cuda", require_kernels=True, say=print) if optimizer else None,
        device="cuda",
    )


def losses_of(engine: ZeroEngine, steps: int = 20) -> list[float]:
    """Of steps on batches that come back, each between two evaluations."""
    data = torch.randint(VOCAB, (4, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        if engine._in_backward is not None:
            engine.begin_step(1e-3)
        losses.append(engine.accumulate(data[step % 4], index=0, micro_batches=1).item())
        assert engine.step(1e-3).skipped.item() == 0
        losses.append(engine.evaluate(data[step % 4]).item())
    return losses


def first_gradient(engine: ZeroEngine) -> torch.Tensor:
    """Of all elements: first moments after a step are the gradient times 1 - beta 1."""
    losses_of(engine, steps=1)
    return torch.cat([moment.flatten().double() for moment in engine.states.shards("exp_avg")])


def error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return ((gradient - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="gpt"),
        pytest.param(LLAMA, id="llama", marks=pytest.mark.gpu_long),
        pytest.param({"unit": "sublayer"}, id="gpt-halves", marks=pytest.mark.gpu_long),
        pytest.param(LLAMA | {"unit": "sublayer"}, id="llama-halves"),
        pytest.param(GEMMA, id="gemma"),
        pytest.param({"fp32_residual_connection": True}, id="gpt-wide"),
        pytest.param({"recompute": IN_CHUNKS}, id="gpt-chunks"),
    ],
)
def test_compiled_parts_learn_what_eager_ones_do(changes: dict[str, Any]) -> None:
    """Gradients are as exact as eager ones in bf16, and in fp32 equal but for rounding, 2^16 times finer."""
    said: list[str] = []
    fp32 = PrecisionConfig(fp32=True)
    exact, of_eager = first_gradient(plain(precision=fp32, **changes)), first_gradient(plain(**changes))
    scatter = error(of_eager, exact)  # each of some 10^6 elements adds to it, so it hardly depends on chance
    assert error(first_gradient(compiled(said, precision=fp32, **changes)), exact) <= 2**-10 * scatter
    engine = compiled(said, **changes)
    assert error(first_gradient(engine), exact) <= 1.1 * scatter
    assert losses_of(engine)[-1] < 6.9 - 0.5  # a guess among the vocabulary loses ln 1000 = 6.9
    assert said == []


@pytest.mark.usefixtures("deterministic")
def test_recomputation_repeats_the_draws_of_dropout() -> None:
    """To the bit."""
    said: list[str] = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        stored = losses_of(compiled(said, dropout=0.1), steps=5)
        assert losses_of(compiled(said, dropout=0.1, recompute=FULL), steps=5) == stored
        assert losses_of(compiled(said, dropout=0.1, stage=3), steps=5) == stored
        in_chunks = losses_of(compiled(said, dropout=0.1, recompute=IN_CHUNKS), steps=5)
        both = replace(FULL, mlp_chunks_for_training=4)
        assert losses_of(compiled(said, dropout=0.1, recompute=both, stage=3), steps=5) == in_chunks
    assert said == []


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recompute", [None, FULL], ids=["stored", "recomputed"])
def test_no_backward_reads_weights_that_have_stepped_in_it(recompute: RecomputeConfig | None) -> None:
    """Without clipping the losses are those of steps after the backward, to the bit."""
    said, found = list[str](), []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for in_backward in (False, True):
            optimizer = OptimizerConfig(clip_grad=0, optimizer_in_backward=in_backward)
            for build in (plain, partial(compiled, said)):
                engine = build(recompute=recompute, optimizer=optimizer)
                found.append(losses_of(engine, steps=5))
    assert found[:2] == found[2:]
    assert said == []


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        pytest.param(0, {}, id="0-gpt"),
        pytest.param(3, LLAMA, id="3-llama"),
        pytest.param(0, LLAMA, id="0-llama", marks=pytest.mark.gpu_long),
        pytest.param(3, {}, id="3-gpt", marks=pytest.mark.gpu_long),
    ],
)
def test_a_steady_step_neither_waits_for_the_device_nor_allocates(
    stage: int, changes: dict[str, Any]
) -> None:
    engine = compiled([], stage=stage, **changes)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), device="cuda")
    assert_steady(lambda: step_of(engine, tokens, micro_batches=2), warmup=4)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_memory_of_an_mlp_in_chunks_does_not_grow_with_the_sample(compiles: bool) -> None:
    """Beyond its input, its output and their gradients; the gradients of its parameters are always there."""
    found = []
    for tokens in (8192, 65536):
        torch._dynamo.reset()
        config = ModelConfig(num_layers=1, hidden_size=1024, num_attention_heads=8, seq_length=tokens)
        model = GPT(config, 128, RecomputeConfig(mlp_chunks_for_training=tokens // 2048)).cuda().bfloat16()
        if compiles:
            compile_parts(model, (1, tokens), print, on_gpu=True)
        half = model.eval().layers[0].halves[1]
        for _ in range(2):  # the second one takes no memory for kernels
            x = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            gradient = torch.randn_like(x)
            half.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            half(x).backward(gradient)
            torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before - 2 * x.nbytes)
        del x, gradient, half, model
    assert found[1] <= found[0] + 2**20
