"""An island on a GPU beside one on CPUs takes the same outer steps, bit for bit."""

from pathlib import Path

import pytest

from tests.support import logged
from tests.train.conftest import BYTES, TINY
from tests.train.test_islands import NAMES, equal, islands


@pytest.mark.parametrize("format", ["fp32", "rotated4"])
def test_islands_on_a_gpu_and_on_cpus_end_with_the_same_weights(tmp_path: Path, format: str) -> None:
    flags = ["--mock-data", *BYTES, *TINY]
    settings = f"--outer-interval 4 --outer-overlap 2 --train-iters 12 --eval-iters 0 --outer-format {format}"
    with islands(tmp_path, flags, settings) as both:
        both.start("west", "--device", "cpu")
        both.start("east", "--device", "cuda")
        both.end()
        assert equal(both.weights("west"), both.weights("east"))
        assert [logged(both.metrics(name), "islands") for name in NAMES] == [[2] * 7] * 2
        assert not any("WARNING" in run.out(0) for run in both.runs.values())
