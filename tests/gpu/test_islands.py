"""An island on a GPU beside one on CPUs takes the same outer steps, bit for bit."""

from pathlib import Path

import pytest

from tests.support import Run, logged
from tests.train.conftest import BYTES, TINY
from tests.train.test_islands import NAMES, equal, islands


@pytest.mark.parametrize("format", ["fp32", "rotated4"])
def test_islands_on_a_gpu_and_on_cpus_end_with_the_same_weights(tmp_path: Path, format: str) -> None:
    """From a checkpoint, as a GPU draws other initial weights."""
    flags, first = ["--mock-data", *BYTES, *TINY, "--eval-iters", "0"], str(tmp_path / "first")
    with Run(tmp_path, 1) as run:
        run.start(0, *flags, "--device", "cpu", "--train-iters", "1", "--save", first)
        assert run.statuses() == {0: 0}, run.err(0)
    settings = f"--outer-interval 4 --outer-overlap 2 --train-iters 12 --outer-format {format} --finetune"
    with islands(tmp_path / "both", flags, settings, "--wait", "60") as both:
        both.start("west", "--device", "cpu", "--load", first)
        both.start("east", "--device", "cuda", "--load", first)
        both.end()
        assert equal(both.weights("west"), both.weights("east"))
        assert [logged(both.metrics(name), "islands") for name in NAMES] == [[2] * 7] * 2
        assert not any("WARNING" in run.out(0) for run in both.runs.values())
