"""Whole runs as islands: equal weights at the end, whatever their meshes, kills and pauses."""

import json
import random
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from benchmarks.faults.network import Link
from megatron_zpp.checkpoint.directory import newest_first
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.islands.link import Outcome
from megatron_zpp.train import islands as of_a_run
from megatron_zpp.train.steps.stopping import Stop
from tests.support import Run, free_port, logged

NAMES = ("west", "east")
MESHES = {"west": (2, "--zero-stage 3"), "east": (1, "--zero-stage 1 --eval-iters 2")}


def place(link: Link | None, node: int, clock: float = 0.0) -> None:
    """Move this process to an end of the link, and let its clock be off by some seconds."""
    if link is not None:
        link.enter(node)
    true = time.time
    time.time = lambda: true() + clock


class Islands:
    """A hub and the runs of two islands, of two ranks and of one, on a directory."""

    def __init__(self, directory: Path, flags: list[str], settings: str, link: Link | None = None) -> None:
        """With a `link` they are at its ends, and the hub is beside west."""
        directory.mkdir(exist_ok=True)
        self._directory, self._flags, self._link = directory, [*flags, *settings.split()], link
        host = "127.0.0.1" if link is None else link.address(0)
        self._address, self._secret = f"{host}:{free_port()}", directory / "secret"
        self._secret.write_text("a secret that nobody else has")
        self.hub = Run(directory / "hub", 1, "megatron_zpp.commands.islands")
        self.runs: dict[str, Run] = {}

    def start_hub(self, *more: str) -> None:
        """Start the hub, again if it has ended."""
        flags = ["--listen", self._address, "--directory", str(self._directory / "steps"), "--wait", "5"]
        flags += ["--secret-file", str(self._secret), "--names", *NAMES, *more]
        self.hub.start(0, *flags, change=partial(place, self._link, 0))

    def start(self, island: str, *more: str, clock: float = 0.0) -> Run:
        """Start an island, from its newest checkpoint, whose clock is off by some seconds."""
        ranks, settings = MESHES[island]
        saves = str(self.saves(island))
        run = self.runs[island] = Run(self._directory / island, ranks)
        for rank in range(ranks):
            flags = [*self._flags, *settings.split(), "--save", saves, "--load", saves, *more]
            flags += ["--islands-at", self._address, "--island-names", *NAMES, "--island", island]
            flags += ["--island-secret", str(self._secret), "--metrics-file", str(self.metrics(island))]
            run.start(rank, *flags, change=partial(place, self._link, NAMES.index(island), clock))
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

    def consumed(self, island: str) -> list[int]:
        """The samples read for each outer step of which the island was a member."""
        records = sorted((self._directory / "steps").glob("step_*/closed.json"))
        members = [json.loads(path.read_text())["members"] for path in records]
        return [of_step[island]["consumed"] for of_step in members if island in of_step]

    def validation(self, island: str) -> list[float]:
        return logged(self.metrics(island), "valid_loss")


@contextmanager
def islands(
    directory: Path, flags: list[str], settings: str, *of_hub: str, link: Link | None = None
) -> Iterator[Islands]:
    """With the hub started; all processes end with the block."""
    both = Islands(directory, flags, settings, link)
    with both.hub:
        both.start_hub(*of_hub)
        try:
            yield both
        finally:
            for run in both.runs.values():
                run.__exit__(None, None, None)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("west", "optimizer"), [("", "adam"), ("--tensor-model-parallel-size 2", "muon")])
def test_islands_of_other_meshes_end_with_the_same_weights(
    flags: list[str], tmp_path: Path, west: str, optimizer: str
) -> None:
    settings = "--outer-interval 3 --train-iters 9 --eval-interval 2 --eval-iters 1 --outer-format rotated4"
    settings += f" --optimizer {optimizer} --sample-prompt 32"
    with islands(tmp_path, flags, settings, "--quorum", "2") as both:
        both.start("west", *west.split())
        both.start("east")
        both.end()
        assert equal(both.weights("west"), both.weights("east"))
        assert west or both.validation("west") == both.validation("east")  # sums of tensor ranks round
        assert west or logged(both.metrics("west"), "sample") == logged(both.metrics("east"), "sample")
        first, other = (logged(both.metrics(name)) for name in NAMES)
        assert first[0] != other[0]  # they read other samples
        assert logged(both.metrics("west"), "islands") == [2] * 7


def test_islands_that_end_during_an_exchange_resume_with_the_same_bits(
    flags: list[str], tmp_path: Path
) -> None:
    """Ends after 4 and 8 of 12 steps, an exchange after each third, whose result is taken two steps later."""
    settings = "--outer-interval 3 --train-iters 12 --eval-iters 0 --outer-format rotated4 --outer-overlap 2"
    found = []
    for directory, more in ((tmp_path / "whole", ""), (tmp_path / "parts", "--exit-interval 4")):
        with islands(directory, flags, f"{settings} {more}", "--quorum", "2") as both:
            for _ in range(3 if more else 1):
                for name in NAMES:
                    both.start(name)
                both.end()
                if len(logged(both.metrics("east"))) == 4:
                    assert both.start("east", "--outer-interval", "6").statuses() == {0: 1}
                    assert "--outer-interval 6: an exchange of the checkpoint is under" in both.runs[
                        "east"
                    ].err(0)
            found += [both.weights(name) for name in NAMES]
    assert all(equal(found[0], weights) for weights in found)


def test_an_exchange_under_way_is_forgotten_without_its_states(flags: list[str], tmp_path: Path) -> None:
    """Both begin from west's weights, at a new hub, and contribute to no outer step before the next one."""
    settings = "--outer-interval 3 --train-iters 6 --eval-iters 0 --outer-overlap 2"
    with islands(tmp_path, flags, settings, "--quorum", "2") as both:
        for name in NAMES:
            both.start(name, "--exit-interval", "4")
        both.end()
        both.hub.send(0, signal.SIGKILL)
        both.hub.statuses()
        (tmp_path / "steps").rename(tmp_path / "old")
        both.start_hub("--quorum", "2")
        for name in NAMES:
            more = ("--load", str(both.saves("west")), "--save", str(tmp_path / f"new-{name}"))
            both.start(name, "--no-load-optim", *more)
        both.end()
    assert [path.name for path in (tmp_path / "steps").glob("step_*")] == ["step_00000001"]


def test_a_killed_island_comes_back_where_the_other_one_is(flags: list[str], tmp_path: Path) -> None:
    settings = "--outer-interval 3 --train-iters 150 --eval-iters 0 --save-interval 5"
    with islands(tmp_path, flags, settings) as both:
        west, east = (both.start(name) for name in NAMES)
        west.wait_for("outer step 3 of west, east")
        west.send(0, signal.SIGKILL)
        west.statuses()
        east.wait_for("outer step 7 of east")
        again = both.start("west")
        again.wait_for("were taken without this island")
        both.hub.send(0, signal.SIGKILL)
        both.hub.statuses()
        both.start_hub()
        both.end()
        assert equal(both.weights("west"), both.weights("east"))
        taken = logged(both.metrics("west"), "iteration")
        assert taken[-1] == 150
        assert 10 < len(taken) < 145  # it took no step while it was away
        read = [0, *both.consumed("west")]
        assert all(0 < after - before <= 3 * 8 for before, after in pairwise(read))  # none left out, or twice


def test_an_island_comes_back_with_a_smaller_batch_and_reads_on_to_the_end(
    flags: list[str], tmp_path: Path
) -> None:
    """Its checkpoint is older than its newest outer step, up to which it has read more."""
    settings = "--outer-interval 3 --train-iters 30 --eval-iters 0 --zero-stage 1"
    with islands(tmp_path, flags, settings, "--quorum", "2") as both:
        both.start("west")
        both.start("east", "--micro-batch-size", "32", "--exit-interval", "3").statuses()
        killed = both.start("east", "--micro-batch-size", "32")
        killed.wait_for("outer step 4 of west, east")
        killed.send(0, signal.SIGKILL)
        killed.statuses()
        both.start("east")
        both.end()
        assert equal(both.weights("west"), both.weights("east"))


def test_an_island_of_other_data_or_weights_is_refused_in_a_line(flags: list[str], tmp_path: Path) -> None:
    with islands(tmp_path, flags, "--outer-interval 3 --train-iters 30000 --eval-iters 0") as both:
        west = both.start("west")
        west.wait_for("outer step 0 of west")
        data = next(flag for flag in flags if flag.endswith("bytes"))
        for more, refused in (
            (("--dataset-packing", "best-fit"), "--dataset-packing best-fit: of island east, but west began"),
            (("--vocab-size", "257"), "tokenizer NullTokenizer of 258 entries"),
            (("--data-path", "1", data, "2", data), "data "),
            (("--init-method-std", "0.03"), "--island east: its outer weights are not those of west before"),
        ):
            east = both.start("east", *more)
            assert east.statuses() == {0: 1}
            assert f"error: {refused}" in east.err(0)
        west.wait_for("WARNING: --island west: its outer weights are not those of east")


def test_an_island_whose_batch_gives_megatrons_order_another_length_is_refused(
    flags: list[str], tmp_path: Path
) -> None:
    settings = "--outer-interval 3 --train-iters 30000 --eval-iters 0 --dataset-order megatron"
    with islands(tmp_path, [*flags, "--data-cache-path", str(tmp_path)], settings) as both:
        both.start("west").wait_for("iteration")
        east = both.start("east")  # half as many ranks
        assert east.statuses() == {0: 1}
        assert "--train-iters × --global-batch-size × islands 240000: of island east, but west" in east.err(0)


def test_a_stop_while_an_island_catches_up_leaves_it_at_the_outer_step_it_has_reached() -> None:
    """Else its checkpoint would replay outer steps that its outer weights have."""
    state, link, stop = Mock(), Mock(), Mock(side_effect=Stop(75, "SIGTERM"))
    found = [Future() for _ in range(3)]
    found[0].set_result((2, 0.0, 0.0))  # the newest outer step
    found[1].set_result(Outcome(0, ("east",), {}, {}, {}))
    link.newest.return_value, link.past.side_effect = found[0], found[1:]
    engine = SimpleNamespace(topology=Topology(), device="cpu", sum_over_ranks=lambda value: value)
    island = object.__new__(of_a_run.Islands)
    island.__dict__ |= {"_config": SimpleNamespace(outer_interval=3), "_iterations": 9}
    island.__dict__ |= {"_state": state, "_link": link, "_engine": engine, "_check_stop": stop}
    island.__dict__ |= {"_island": "west", "_pace": 0.0, "_now": Mock(), "_say": Mock()}
    assert island.start(Progress(0, 0)) == Progress(3, 0)
    assert [call[0] for call in state.method_calls] == ["replay", "give_up"]


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(60))
def test_a_fault_of_one_island_is_nothing_to_the_other(
    flags: list[str], tmp_path: Path, number: int, link: Link
) -> None:
    """A kill, a stop, a link that is down, or a clock that is off, at a random moment."""
    draw = random.Random(number)
    fault, victim = ("kill", "stop", "cut", "clock")[number % 4], draw.choice(NAMES)
    seconds, other = draw.uniform(1, 8), next(name for name in NAMES if name != victim)
    settings = "--train-iters 150 --outer-interval 10 --outer-overlap 8 --outer-format rotated4"
    settings += " --eval-iters 0 --save-interval 10 --micro-batch-size 32"
    with islands(tmp_path, flags, settings, "--wait", "0.8", link=link) as both:
        for name in NAMES:
            both.start(name, clock=draw.uniform(-86400, 86400) if (fault, name) == ("clock", victim) else 0.0)
        runs, survivor = both.runs, both.metrics("west" if fault == "cut" else other)
        runs[other].wait_for(" of west, east")
        time.sleep(draw.uniform(0, 1))
        before = len(logged(survivor))
        if fault == "kill":
            runs[victim].send(draw.randrange(len(runs[victim].processes)), signal.SIGKILL)
            runs[victim].statuses()
            time.sleep(seconds / 2)
            both.start(victim)
        elif fault == "stop":
            for signal_number in (signal.SIGSTOP, signal.SIGCONT):
                for rank in runs[victim].processes:
                    runs[victim].send(rank, signal_number)
                time.sleep(seconds)
        elif fault == "cut":  # between east and the hub
            link.fail("cut", 1)
            time.sleep(seconds)
            link.mend()
        during = logged(survivor, "elapsed_ms")[before:]
        both.end()
        assert equal(both.weights("west"), both.weights("east"))
        took, losses = logged(survivor, "elapsed_ms"), logged(survivor)
        assert statistics.mean(losses[-10:]) < statistics.mean(losses[before - 10 : before])
        assert not during or statistics.mean(during) <= 1.1 * statistics.mean(took[10:before])
