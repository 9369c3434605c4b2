"""--finetune begins at iteration 0, also where the formats of ZeRO++ depend on the iteration."""

import hashlib
from pathlib import Path

from tests.config.command_line import SMALLEST
from tests.support import Run

TINY = [*SMALLEST, *"--hidden-size 64 --lr 3e-3 --device cpu --zero-stage 3".split()]
FORMATS = (
    "--zero-hpz-partition-size auto --zero-quantized-weights --zero-quantized-weights-format delta4 "
    "--zero-quantized-gradients --zero-quantized-gradients-format rotated4"
)


def trained(directory: Path, *flags: str) -> None:
    """Two nodes of one rank."""
    with Run(directory, 2) as run:
        for rank in (0, 1):
            run.start(rank, *TINY, *flags, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        assert run.statuses() == {0: 0, 1: 0}, run.errors()


def test_a_stopped_and_resumed_finetuning_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Signs of rotated gradients are counted from the finetuning's start."""
    base, whole, halves = (str(tmp_path / name) for name in ("base", "whole", "halves"))
    trained(tmp_path / "0", "--train-iters", "5", "--save", base)
    flags = [*FORMATS.split(), "--train-iters", "4"]
    trained(tmp_path / "1", *flags, "--finetune", "--load", base, "--save", whole)
    trained(tmp_path / "2", *flags, "--finetune", "--load", base, "--save", halves, "--exit-interval", "2")
    trained(tmp_path / "3", *flags, "--load", halves, "--save", halves)
    for rank in (0, 1):
        files = [Path(run) / "iter_0000004" / f"rank_{rank:05}.safetensors" for run in (whole, halves)]
        first, second = (hashlib.sha256(file.read_bytes()).digest() for file in files)
        assert first == second
