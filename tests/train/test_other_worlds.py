"""A run that resumes with other ranks and at another stage sees every sample once, and learns the same."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data import loader
from tests.model.variants import MODELS, flags_of
from tests.support import Run, logged, nightly
from tests.train.conftest import BYTES, TINY

LENGTH = "--micro-batch-size 1 --global-batch-size 12 --eval-iters 0 --num-workers 0 --fp32".split()


def write_down_samples() -> None:
    """Record the reads of this rank's loader in the file LEDGER; without workers nothing is read ahead."""
    read = loader._Ranges.__getitem__

    def read_range(ranges: loader._Ranges, place: tuple[int, int]) -> np.ndarray:
        first, count = place
        with open(os.environ["LEDGER"], "a") as ledger:
            ledger.write("".join(f"{index}\n" for index in range(first, first + count)))
        return read(ranges, place)

    loader._Ranges.__getitem__ = read_range


@pytest.mark.parametrize("model", [nightly("gpt2"), "llama"])
def test_no_sample_is_lost_or_repeated(corpus: str, tmp_path: Path, model: str) -> None:
    """By a ledger of the reads of all loaders, with 2 and 3 ranks at stages 1 and 3."""
    flags = ["--data-path", corpus, "--split", "80,10,10", *BYTES, *TINY, *LENGTH, "--train-iters", "6"]
    flags += flags_of(MODELS[model])
    save = str(tmp_path / "checkpoints")
    for world, stage, stop in ((2, 1, 3), (3, 3, 6)):
        part = ["--zero-stage", str(stage), "--save", save, "--load", save, "--exit-interval", str(stop)]
        part += ["--metrics-file", str(tmp_path / "metrics.jsonl")]
        with Run(tmp_path / str(world), world) as run:
            for rank in range(world):
                ledger = str(tmp_path / f"{world}.{rank}.ledger")
                run.start(rank, *flags, *part, change=write_down_samples, LEDGER=ledger)
            assert set(run.statuses().values()) == {0}, run.errors()
        read = [int(line) for path in tmp_path.glob(f"{world}.*.ledger") for line in path.read_text().split()]
        assert sorted(read) == list(range(12 * (stop - 3), 12 * stop))

    with Run(tmp_path / "1", 1) as run:
        run.start(0, *flags, "--metrics-file", str(tmp_path / "whole.jsonl"))
        assert run.statuses() == {0: 0}
    whole = logged(tmp_path / "whole.jsonl")
    assert logged(tmp_path / "metrics.jsonl") == pytest.approx(whole, rel=2**-20)  # fp32, five steps
