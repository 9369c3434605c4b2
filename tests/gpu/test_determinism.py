"""--deterministic-mode: runs that compile everything, each for itself, have equal bits."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT, logged, run

RUN = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 2 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 512 --micro-batch-size 4 --global-batch-size 8 --bf16 --lr 1e-3 "
    "--train-iters 6 --log-interval 1 --eval-iters 1 --compile --deterministic-mode"
).split()
AGAIN = "--recompute-granularity full --recompute-method uniform --mlp-chunks-for-training 4"
CAPPED = "--attention-dropout 0 --attn-logit-softcapping 30"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --attention-dropout 0 --hidden-dropout 0"
)


def bits(place: Path, flags: list[str]) -> tuple[list[Any], dict[str, bytes]]:
    """The losses and states of a run whose caches are empty, so that it chooses all its kernels anew."""
    metrics, saved = place / "metrics.jsonl", place / "saved"
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TRITON_CACHE_DIR": str(place / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    }
    files = ["--metrics-file", metrics, "--save", saved, "--require-kernels"]
    done = run(ROOT / "pretrain_gpt.py", *RUN, *flags, *files, **caches)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any((place / "inductor").rglob("*.py"))
    losses = [*logged(metrics), *logged(metrics, "grad_norm"), *logged(metrics, "valid_loss")]
    return losses, {path.name: path.read_bytes() for path in saved.rglob("*.safetensors")}


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="torch's compiler has no such mode"
)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--sample-prompt 7", id="gpt"),
        pytest.param(LLAMA, id="llama", marks=pytest.mark.gpu_long),
        pytest.param(AGAIN, id="again"),
        pytest.param(f"{LLAMA} --window-size 127,0 --reset-attention-mask", id="packed-flash"),
        pytest.param(CAPPED, id="flex", marks=pytest.mark.gpu_long),
        pytest.param("--attention-backend efficient", id="efficient", marks=pytest.mark.gpu_long),
    ],
)
def test_equal_runs_at_the_same_time_have_equal_bits(flags: str, tmp_path: Path) -> None:
    """They take each other's time while they choose kernels, and their caches are empty."""
    places = [tmp_path / name for name in ("one", "other")]
    with ThreadPoolExecutor(len(places)) as pool:
        one, other = pool.map(lambda place: bits(place, flags.split()), places)
    losses, states = one
    assert len(losses) > 12
    assert states
    assert one == other
