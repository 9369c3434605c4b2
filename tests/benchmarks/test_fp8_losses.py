"""Pairs of runs with 8-bit products: each run's flags are a run's, and equal runs end with equal losses."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import fp8_losses, paired_runs
from megatron_zpp.config.root import parse_args

SMALL = "--size tiny --steps 6 --pairs 2 --eval-samples 16 --device cpu --runs".split()


def test_equal_runs_end_alike_and_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs, which repeat all sums; two seeds have other weights and samples."""
    monkeypatch.setattr(paired_runs, "ProcessPoolExecutor", lambda count, *_: ThreadPoolExecutor(count))
    argv = [*SMALL, "bf16, again", "--output", str(tmp_path), "--runs-file", str(tmp_path / "runs.jsonl")]
    assert fp8_losses.main(argv) == 0
    first = json.loads((tmp_path / "fp8_losses_tiny.json").read_text())["figures"]["runs"]
    assert first["bf16, again"]["gap"]["by_seed"] == [0.0, 0.0]
    assert first["bf16"]["losses"]["0"] != first["bf16"]["losses"]["1"]
    assert first["bf16"]["skipped_steps"] == 0
    monkeypatch.setattr(fp8_losses, "train", lambda *_: pytest.fail("a finished run was repeated"))
    assert fp8_losses.main(argv) == 0
    assert fp8_losses.main([*argv, "--lr", "2e-3"]) == 2  # refuses to replace a result of other settings
    with pytest.raises(pytest.fail.Exception, match="repeated"):  # the rate decides the bits of a run
        fp8_losses.main([*argv, "--lr", "2e-3", "--name", "other"])


@pytest.mark.parametrize("name", fp8_losses.RUNS)
def test_flags_are_those_of_a_run(name: str) -> None:
    for size, (layers, *_, steps, samples) in fp8_losses.SIZES.items():
        settings = {"size": size, "steps": steps, "lr": 1e-3, "device": "cpu", "extra": ["--clip-grad=0.5"]}
        config = parse_args(fp8_losses.flags_of(settings, name, seed=3))
        assert (config.model.num_layers, config.training.micro_batch_size) == (layers, samples)
        assert (config.training.train_iters, config.training.seed) == (steps, 3)
        assert config.optimizer.clip_grad == 0.5
        assert config.precision.fp8 == ("fp8" in name)
        assert config.precision.fp8_delayed == (name not in ("bf16", "bf16, again", "fp8"))
        assert config.precision.fp8_param_gather == ("codes" in name)
        assert config.precision.fp8_output_layer == ("output" in name)
