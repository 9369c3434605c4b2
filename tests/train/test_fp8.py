"""Whole runs with --fp8: the same for any stage, ranks and recomputation, and after a resume."""

import json
from pathlib import Path

import pytest

from tests.model.variants import MODELS, flags_of
from tests.support import pretrain


def losses_of(path: Path) -> list[float]:
    records = map(json.loads, path.read_text().splitlines())
    return [value for record in records for name, value in record.items() if name.endswith("_loss")]


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_a_run_of_8_bit_products(flags: list[str], tmp_path: Path, model: str) -> None:
    # A CPU takes its time for such products.
    small = ["--hidden-size", "32", "--kv-channels", "16", "--global-batch-size", "8"]

    def run(name: str, *more: str, processes: int = 1) -> list[float]:
        command = [*flags, *small, *flags_of(MODELS[model]), "--fp8", "--bf16", "--train-iters", "4", *more]
        done = pretrain(*command, "--metrics-file", str(tmp_path / name), processes=processes)
        assert done.returncode == 0, done.stderr
        assert "CPU, bfloat16 with 8-bit products, ZeRO stage" in done.stdout
        assert done.stderr.count("pretrain_gpt.py: warning: --fp8: hidden size 32 is below 2048, the") == 1
        return losses_of(tmp_path / name)

    whole = run("whole")
    saved = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    recomputed = "--zero-stage 3 --recompute-granularity full --recompute-method uniform".split()
    first = run("first", *saved, *recomputed, "--exit-interval", "2", processes=2)
    assert first + run("second", *saved) == pytest.approx(whole, rel=1e-3)  # sums of bf16 gradients
