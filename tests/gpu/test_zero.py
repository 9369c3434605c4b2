"""ZeRO on GPUs: several ranks over NCCL, no host synchronisation, no allocation in a steady step."""

import json
from pathlib import Path

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.run import ZeroConfig
from tests.support import pretrain
from tests.zero.engines import engine_of

VOCAB = 1000
MODEL = ModelConfig(num_layers=6, hidden_size=256, num_attention_heads=4, seq_length=128)
GPUS = torch.cuda.device_count()


@pytest.mark.parametrize("precision", [PrecisionConfig(bf16=True), PrecisionConfig(fp16=True)])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_steady_step_neither_waits_for_the_device_nor_allocates(
    stage: int, precision: PrecisionConfig
) -> None:
    engine = engine_of(MODEL, VOCAB, zero=ZeroConfig(zero_stage=stage), precision=precision, device="cuda")
    tokens = torch.randint(VOCAB, (4, 129), device="cuda")

    def step() -> None:
        for index in range(2):
            engine.accumulate(tokens, index=index, micro_batches=2)
        engine.step(1e-3)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    mallocs = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == mallocs


@pytest.mark.parametrize("stage", [0, 3])
def test_an_offloaded_optimizer_takes_the_same_steps(stage: int) -> None:
    """AdamW's states leave the GPU; the weights differ by the CPU's rounding of a step alone."""
    curves, allocated = [], []
    for offload in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        zero = ZeroConfig(zero_stage=stage, zero_offload_optimizer=offload)
        engine = engine_of(MODEL, VOCAB, zero=zero, precision=PrecisionConfig(bf16=True), device="cuda")
        allocated.append(torch.cuda.memory_allocated() - before)
        losses = []
        for step in range(10):
            torch.manual_seed(step)
            tokens = torch.randint(VOCAB, (4, 129), device="cuda")
            losses.append(engine.accumulate(tokens, index=0, micro_batches=1).item())
            engine.step(1e-3)
        curves.append(losses)
        elements = sum(unit.layout.numel for unit in engine.units)
        engine.close()
        del engine
    assert curves[1] == pytest.approx(curves[0], rel=2 * torch.finfo(torch.bfloat16).eps)
    assert allocated[0] - allocated[1] >= 12 * elements


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_gpus_equal_one(tmp_path: Path, accumulation: int) -> None:
    """fp32, no dropout: the loss of every step at every stage, and a resume at another stage."""
    command = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 999 --num-layers 4 --hidden-size 100 "
        "--num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --fp32 --lr 1e-3 --train-iters 6 "
        f"--global-batch-size {4 * accumulation} --log-interval 1 --eval-iters 1 --num-workers 0"
    ).split()
    curves = {}
    for name, processes, extra in (
        ("one", 1, []),
        *((f"stage {stage}", 2, ["--zero-stage", str(stage)]) for stage in range(4)),
    ):
        path = tmp_path / f"{name}.jsonl"
        done = pretrain(*command, *extra, "--metrics-file", str(path), processes=processes)
        assert done.returncode == 0, done.stderr[-2000:]
        records = [json.loads(line) for line in path.read_text().splitlines()]
        curves[name] = [r["lm_loss"] for r in records if "lm_loss" in r]
    for name, losses in curves.items():
        assert losses == pytest.approx(curves["one"], rel=1e-6), name
