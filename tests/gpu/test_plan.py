"""The plan's peak against CUDA's allocator, where CPUs cannot tell: dropout, offloading, other formats."""

import gc
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.ops.library import load_operations
from megatron_zpp.plan.memory import memory_of
from tests.gpu.steady import step_of
from tests.model.variants import LLAMA
from tests.plan.jobs import FULL, NO_DROPOUT, job_of
from tests.zero.engines import engine_of

SHAPE = {"num_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024} | NO_DROPOUT
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
IN_CHUNKS = {"mlp_chunks_for_training": 16}
OFFLOAD = FULL | {"recompute_offload": True}


@pytest.mark.parametrize(
    ("precision", "recompute", "zero", "changes", "vocab", "micro_batches"),
    [
        ({"bf16": True}, {}, {}, {}, 50304, 1),
        ({"bf16": True}, {}, {"zero_stage": 2}, DROPOUT, 1000, 1),
        ({"fp16": True}, {}, {"zero_stage": 3}, DROPOUT, 50000, 3),
        ({"fp32": True}, {}, {}, {}, 1000, 1),
        (
            {"bf16": True},
            {},
            {"zero_stage": 1},
            {"seq_length": 128, "untie_embeddings_and_output_weights": True},
            50304,
            2,
        ),
        ({"bf16": True}, {"recompute_granularity": "selective"}, {}, DROPOUT, 1000, 1),
        ({"bf16": True}, FULL, {"zero_stage": 3}, DROPOUT, 1000, 2),
        ({"bf16": True}, FULL | {"recompute_num_layers": 4}, {}, {}, 1000, 1),
        ({"bf16": True}, OFFLOAD, {"zero_stage": 1}, {"num_layers": 24}, 1000, 1),
        ({"bf16": True}, {}, {"zero_stage": 3, "zero_offload_optimizer": True}, {}, 1000, 1),
        ({"bf16": True}, {}, {"zero_stage": 3}, LLAMA, 1000, 1),
        ({"bf16": True}, {"recompute_granularity": "selective"}, {}, LLAMA, 50_000, 1),
        ({"bf16": True}, OFFLOAD, {"zero_stage": 1}, LLAMA | {"num_layers": 24}, 1000, 1),
        ({"bf16": True}, IN_CHUNKS, {}, {"seq_length": 4096}, 1000, 1),
        ({"bf16": True}, OFFLOAD | IN_CHUNKS, {"zero_stage": 3}, {"seq_length": 8192}, 1000, 1),
        ({"bf16": True}, FULL, {}, {"optimizer_in_backward": True}, 1000, 1),
        ({"bf16": True}, {}, {}, {"optimizer_in_backward": True}, 50_000, 1),
    ],
)
def test_the_peak_is_within_five_percent(
    precision: dict, recompute: dict, zero: dict, changes: dict[str, Any], vocab: int, micro_batches: int
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    settings = SHAPE | changes
    optimizer = OptimizerConfig(optimizer_in_backward=settings.pop("optimizer_in_backward", False))
    model, size = ModelConfig(**settings), 8
    engine = engine_of(
        model,
        vocab,
        zero=ZeroConfig(**zero),
        recompute=RecomputeConfig(**recompute),
        precision=PrecisionConfig(**precision),
        optimizer=optimizer,
        device="cuda",
        operations=load_operations("cuda", require_kernels=True, say=print),
    )
    tokens = torch.randint(vocab, (size, model.seq_length + 1), device="cuda")
    for _ in range(2):
        step_of(engine, tokens, micro_batches, rate=1e-4)
    measured = torch.cuda.max_memory_allocated() - before
    engine.close()
    job = job_of(
        model,
        vocab,
        zero=zero,
        recompute=recompute,
        precision=PrecisionConfig(**precision),
        micro_batch_size=size,
        micro_batches=micro_batches,
        optimizer=optimizer,
    )
    assert memory_of(job).peak == pytest.approx(measured, rel=0.05)
