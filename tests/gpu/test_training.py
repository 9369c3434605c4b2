"""Training on a GPU: the CPU's numbers, each number format, and a resume that loses nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.train.steps.skips import SkipFlag
from tests.gpu.steady import assert_steady, losses_of
from tests.model.variants import NO_DROPOUT
from tests.support import logged, pretrain, trained
from tests.zero.engines import engine_of

VOCAB = 1000
SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128}
MODEL, FP32 = ModelConfig(**SHAPE, **NO_DROPOUT), PrecisionConfig(fp32=True)


def losses_on(
    device: str, precision: PrecisionConfig = FP32, model: ModelConfig = MODEL, **more: Any
) -> list[float]:
    """Ten steps of two micro-batches from the same CPU-made weights."""
    engine = engine_of(model, VOCAB, precision=precision, device=device, **more)
    data = torch.randint(VOCAB, (10, 2, 4, 129), generator=torch.Generator().manual_seed(8))
    return losses_of(engine, data)


def test_the_flag_of_a_skipped_step_comes_without_a_wait_for_the_device() -> None:
    """The step after reads it when its own backward is submitted."""
    engine = engine_of(MODEL, VOCAB, precision=PrecisionConfig(fp16=True), device="cuda")
    tokens, flag = torch.randint(VOCAB, (4, 129), device="cuda"), SkipFlag(engine.device)
    read, skipped = [], torch.zeros(13, device="cuda")

    def step() -> None:
        engine.accumulate(tokens, index=0, micro_batches=1)
        read.append(flag.read())
        result = engine.step(1e-3)
        flag.send(result.skipped)
        skipped[len(read) - 1] = result.skipped

    assert_steady(step, warmup=3)
    read.append(flag.read())
    assert read == [False, *skipped.bool().tolist()][: len(read)]
    assert read[1]  # a scale of 2^32 overflows


@pytest.mark.parametrize(
    ("precision", "other", "rel"),
    [
        (FP32, "cpu", 1e-5),
        (PrecisionConfig(bf16=True), "cuda", 2 * torch.finfo(torch.bfloat16).eps),
        (PrecisionConfig(fp16=True, loss_scale=1024.0), "cuda", 2 * torch.finfo(torch.float16).eps),
    ],
)
def test_each_format_follows_fp32_within_its_rounding(
    precision: PrecisionConfig, other: str, rel: float
) -> None:
    """That of a CPU, or of the GPU itself."""
    assert losses_on("cuda", precision) == pytest.approx(losses_on(other), rel=rel)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--fp16", marks=pytest.mark.gpu_long),
        pytest.param("--recompute-granularity full --recompute-method uniform", marks=pytest.mark.gpu_long),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, flags: str) -> None:
    command = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 2 --hidden-size 128 "
        "--num-attention-heads 2 --seq-length 256 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 "
        f"--train-iters 8 --log-interval 1 --eval-iters 1 {flags}"
    ).split()
    whole, parts, save = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", str(tmp_path / "checkpoints")
    assert pretrain(*command, "--metrics-file", str(whole)).returncode == 0
    parted = [*command, "--metrics-file", str(parts), "--save", save, "--load", save]
    for extra in (["--exit-interval", "4"], []):
        trained(*parted, *extra)
    curves = [logged(path) for path in (whole, parts)]
    assert curves[0] == curves[1]
