"""Whole runs as islands: equal weights at the end, whatever their meshes, kills and pauses."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_zpp.checkpoint.directory import newest_first
from megatron_zpp.checkpoint.read import CheckpointReader
from tests.support import Run, free_port, logged, wait_until

NAMES = ("west", "east")
MESHES = {"west": (2, "--zero-stage 3"), "east": (1, "--zero-stage 1 --global-batch-size 4 --eval-iters 2")}


class Islands:
    """A hub and the runs of two islands, of two ranks and of one, on a directory."""

    def __init__(self, directory: Path, flags: list[str], *more: str) -> None:
        self._directory, self._flags = directory, [*flags, *more, "--outer-interval", "3"]
        self._address, self._secret = f"127.0.0.1:{free_port()}", directory / "secret"
        self._secret.write_text("a secret that nobody else has")
        self.hub = Run(directory / "hub", 1, "megatron_zpp.commands.islands")
        self.runs: dict[str, Run] = {}

    def start_hub(self) -> None:
        """Start the hub, again if it has ended."""
        flags = ["--listen", self._address, "--directory", str(self._directory / "steps"), "--wait", "5"]
        self.hub.start(0, *flags, "--secret-file", str(self._secret), "--names", *NAMES)

    def start(self, island: str, *more: str) -> Run:
        """Start an island, from its newest checkpoint."""
        ranks, settings = MESHES[island]
        saves = str(self.saves(island))
        run = self.runs[island] = Run(self._directory / island, ranks)
        for rank in range(ranks):
            flags = [*self._flags, *settings.split(), "--save", saves, "--load", saves, *more]
            flags += ["--islands-at", self._address, "--island-names", *NAMES, "--island", island]
            flags += ["--island-secret", str(self._secret), "--metrics-file", str(self.metrics(island))]
            run.start(rank, *flags)
        return run

    def end(self) -> None:
        """Wait for the ends of both."""
        for name, run in self.runs.items():
            assert set(run.statuses().values()) == {0}, run.err(0) + run.out(0) + name

    def saves(self, island: str) -> Path:
        return self._directory / f"{island}-saves"

    def metrics(self, island: str) -> Path:
        return self._directory / f"{island}.jsonl"

    def weights(self, island: str) -> dict[str, Tensor]:
        path = next(newest_first(self.saves(island)))
        with CheckpointReader(path) as reader:
            return reader.parameters()

    def validation(self, island: str) -> list[float]:
        return logged(self.metrics(island), "valid_loss")


@contextmanager
def islands(directory: Path, flags: list[str], *more: str) -> Iterator[Islands]:
    """With the hub started; all processes end with the block."""
    both = Islands(directory, flags, *more)
    with both.hub:
        both.start_hub()
        try:
            yield both
        finally:
            for run in both.runs.values():
                run.__exit__(None, None, None)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("format", ["fp32", "rotated4 --outer-overlap 2"])
def test_islands_of_other_meshes_end_with_the_same_weights(
    flags: list[str], tmp_path: Path, format: str
) -> None:
    settings = f"--train-iters 9 --eval-interval 3 --eval-iters 1 --outer-format {format}"
    with islands(tmp_path, flags, *settings.split()) as both:
        for name in NAMES:
            both.start(name)
        both.end()
        assert equal(both.weights("west"), both.weights("east"))
        assert both.validation("west") == both.validation("east")
        west, east = (logged(both.metrics(name)) for name in NAMES)
        assert west[0] != east[0]  # they read other samples
