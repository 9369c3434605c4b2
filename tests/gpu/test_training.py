"""Training on a GPU: the CPU's numbers, each number format, and a resume that loses nothing."""

from pathlib import Path

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
MODEL = ModelConfig(**SHAPE, **NO_DROPOUT)


def losses_on(device: str, precision: PrecisionConfig) -> list[float]:
    """Ten steps of two micro-batches from the same CPU-made weights."""
    engine = engine_of(MODEL, VOCAB, precision=precision, device=device)
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


def test_fp32_equals_the_cpu() -> None:
    exact = PrecisionConfig(fp32=True)
    assert losses_on("cuda", exact) == pytest.approx(losses_on("cpu", exact), rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (PrecisionConfig(bf16=True), torch.bfloat16),
        (PrecisionConfig(fp16=True, loss_scale=1024.0), torch.float16),
    ],
)
def test_low_precision_follows_fp32_within_its_rounding(
    precision: PrecisionConfig, dtype: torch.dtype
) -> None:
    tolerance = 2 * torch.finfo(dtype).eps
    assert losses_on("cuda", precision) == pytest.approx(
        losses_on("cuda", PrecisionConfig(fp32=True)), rel=tolerance
    )


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
