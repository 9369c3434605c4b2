"""A run with an outer optimizer and without other islands."""

from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.directory import newest_first
from megatron_zpp.checkpoint.read import CheckpointReader
from tests.support import logged
from tests.train.in_process import train_here

LENGTH = "--train-iters 7 --eval-interval 2 --eval-iters 1 --outer-interval 3 --outer-alone".split()


def test_a_resumed_run_takes_the_outer_steps_of_an_uninterrupted_one(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third, the sixth and the last step end with one; a start ends, and is evaluated, between two."""
    found = []
    for name, starts in (("whole", [""]), ("parts", ["--exit-interval 4", "--zero-stage 3"])):
        saves, metrics = tmp_path / name, tmp_path / f"{name}.jsonl"
        places = ["--save", str(saves), "--load", str(saves), "--metrics-file", str(metrics)]
        for more in starts:
            train_here([*flags, *LENGTH, *places, *more.split()])
        with CheckpointReader(next(newest_first(saves))) as reader:
            found.append((reader.parameters(), logged(metrics, "valid_loss"), logged(metrics)))
    (whole, *losses), (parts, *losses_of_parts) = found
    assert losses == losses_of_parts
    assert all(torch.equal(whole[name], weight) for name, weight in parts.items())
    assert " outer steps: after every 3 steps, SGD with Nesterov momentum 0.7 and learning rate 0.7\n" in (
        capsys.readouterr().out
    )
