"""Layers that two ranks share on a GPU, compiled and not: what one rank learns, and the memory that it takes.

Both ranks share one GPU, and their collectives go over TCP, so that a machine of one GPU can run this.
"""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.zero import step_sums
from megatron_zpp.zero.engine import ZeroEngine
from tests.gpu.ranks import on_gpus
from tests.gpu.steady import losses_of, step_of
from tests.model import variants
from tests.plan.jobs import job_of
from tests.plan.test_tensor_parallel import Mirrored
from tests.zero import engines
from tests.zero.engines import engine_of

VOCAB, BATCH, LENGTH = 1000, 4, 128
SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": LENGTH}
LLAMA = variants.LLAMA | {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 32}
ACROSS = {"qk_layernorm_across_heads": True, "norm_placement": "after"}
MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA, "olmo2": LLAMA | ACROSS}
BF16, FP32 = PrecisionConfig(bf16=True), PrecisionConfig(fp32=True)


def build(
    topology: Topology,
    tensor: int,
    model: str,
    precision: PrecisionConfig,
    compiled: bool,
    overlapped: bool = False,
    zero: ZeroConfig | None = None,
    context: int = 1,
    comm_type: str = "auto",
    **changes: Any,
) -> ZeroEngine:
    torch._dynamo.reset()
    config = ModelConfig(**SHAPE | MODELS[model] | changes, hidden_dropout=0.0, attention_dropout=0.0)
    engine = engine_of(
        config,
        VOCAB,
        zero=zero or ZeroConfig(zero_stage=0),
        precision=precision,
        topology=topology,
        device="cuda",
        tensor=tensor,
        overlapped=overlapped,
        context=context,
        comm_type=comm_type,
    )
    if compiled:
        compile_parts(engine.model, (BATCH, config.seq_length), print, on_gpu=True)
    return engine


def losses(
    topology: Topology, tensor: int, cases: list[tuple[str, PrecisionConfig, bool]], overlapped: bool = False
) -> list[list[float]]:
    """Of ten steps and an evaluation, for each model, format, and whether layers are compiled."""
    found = []
    data = torch.randint(VOCAB, (10, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    for model, precision, compiled in cases:
        engine = build(topology, tensor, model, precision, compiled, overlapped)
        its = [*losses_of(engine, data[:, None]), engine.evaluate(data[0]).item()]
        engine.close()
        found.append(its)
    return found


@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.gpu_long), "llama", "olmo2"])
def test_two_tensor_ranks_learn_what_one_does(model: str) -> None:
    cases = [(model, precision, compiled) for precision in (FP32, BF16) for compiled in (False, True)]
    expected = losses(Topology(), 1, cases)
    first, second = on_gpus(1, 2, losses, 2, cases, share_one_gpu=True)
    assert first == second
    for case, found, wanted in zip(cases, first, expected, strict=True):
        rel = 2**-8 if case[1] is BF16 else 1e-5  # fp32 products may be TF32's or not, alike on both
        assert found == pytest.approx(wanted, rel=rel), case


@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.gpu_long)])
def test_two_tensor_ranks_hold_half_of_a_model_each(model: str) -> None:
    """Its states, and what a forward leaves for the backward, but for the head's hidden states and numbers
    per token, which stay whole, and replicated parameters.
    """
    cases = [(model, compiled) for compiled in (False, True)]
    ones = held(Topology(), 1, cases)
    for found in on_gpus(1, 2, held, 2, cases, share_one_gpu=True):
        for case, one, two in zip(cases, ones, found, strict=True):
            assert two["states"] <= 0.55 * one["states"], case
            assert two["activations"] <= 0.55 * one["activations"], case


def held(topology: Topology, tensor: int, cases: list[tuple[str, bool]]) -> list[dict[str, int]]:
    """Bytes of bf16 models, compiled or not, after one that pays for the workspaces of cuBLAS."""
    _held(topology, tensor, *cases[0])
    return [_held(topology, tensor, model, compiled) for model, compiled in cases]


def _held(topology: Topology, tensor: int, model: str, compiled: bool) -> dict[str, int]:
    changes = {"hidden_size": 1024, "num_layers": 6, "seq_length": 1024, "num_attention_heads": 16}
    gc.collect()
    start = torch.cuda.memory_allocated()
    engine = build(topology, tensor, model, BF16, compiled, **changes, kv_channels=64, ffn_hidden_size=2816)
    tokens = torch.randint(VOCAB, (BATCH, 1025), device="cuda")
    for _ in range(2):
        step_of(engine, tokens, rate=1e-4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = engine.model(tokens[:, :-1], tokens[:, 1:])
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del loss
    engine.close()
    return {"states": before - start, "activations": after - before}


def with_optimizers(topology: Topology, stage: int) -> list[list[float]]:
    """Losses of ten steps of two micro-batches with the optimizer on the GPU and on the CPU."""
    data = torch.randint(VOCAB, (10, 2, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(8))
    found = []
    for offload in (False, True):
        zero = ZeroConfig(zero_stage=stage, zero_offload_optimizer=offload)
        engine = build(topology, 2, "gpt", BF16, False, zero=zero)
        found.append(losses_of(engine, data))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.gpu_long), 3])
def test_an_offloaded_optimizer_of_tensor_ranks_takes_the_same_steps(stage: int) -> None:
    """But for the CPU's rounding of a step."""
    first, second = on_gpus(1, 2, with_optimizers, stage, share_one_gpu=True)
    assert first == second
    on_gpu, on_cpu = first
    assert on_cpu == pytest.approx(on_gpu, rel=2 * torch.finfo(torch.bfloat16).eps)


PLANNED = {"hidden_size": 1024, "num_layers": 12, "seq_length": 1024, "num_attention_heads": 16}
PLANNED |= {"kv_channels": 64, "num_query_groups": 4}


def peak_and_plan(topology: Topology, tensor: int, compiled: bool, overlapped: bool) -> tuple[int, int]:
    """Bytes that torch has allocated at the peak of two steps of a bf16 Llama, and the planned ones."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = build(topology, tensor, "llama", BF16, compiled, overlapped, **PLANNED)
    tokens = torch.randint(VOCAB, (BATCH, 1025), device="cuda")
    for _ in range(2):
        step_of(engine, tokens, rate=1e-4)
    measured = torch.cuda.max_memory_allocated() - before
    size = {"micro_batch_size": BATCH, "tensor": tensor, "local": tensor}
    job = job_of(engine.model.config, VOCAB, precision=BF16, **size)
    engine.close()
    return measured, memory_of(replace(job, compiled=compiled, overlapped=overlapped)).peak


@pytest.mark.parametrize(
    ("tensor", "compiled"),
    [(2, False), (1, True), *(pytest.param(tensor, False, marks=pytest.mark.gpu_long) for tensor in (1, 4))],
)
def test_a_tensor_ranks_peak_is_planned(tensor: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3%, with collectives that stay in this process: the memory is that of one of the ranks."""
    monkeypatch.setattr(engines, "TensorGroup", lambda ranks, rank, **_: Mirrored(len(ranks)))
    monkeypatch.setattr(step_sums, "sum_over_ranks", lambda value, _: value)
    measured, planned = peak_and_plan(Topology(0, tensor, 0, tensor), tensor, compiled, overlapped=False)
    assert planned == pytest.approx(measured, rel=0.03)
