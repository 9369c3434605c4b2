"""Whole runs that are signalled, killed and poisoned: they stop in order, and resume to the same weights."""

import fcntl
import io
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.train.steps.stopping import Ending, Stop, StopConditions
from megatron_zpp.zero.engine import ZeroEngine
from tests.config.command_line import SMALLEST
from tests.support import ROOT, Run, environment, nightly, wait_until
from tests.train.in_process import train_here
from tests.zero.ranks import on_ranks
from tests.zero.test_differences import train
from tests.zero.zeropp_engines import FOUR_BITS, build

NODE = f"pretrain_gpt.py [{platform.node()}]"
LENGTH = "--train-iters 30 --global-batch-size 8 --num-workers 0 --log-interval 5".split()


def newest(directory: Path) -> str:
    return (directory / "latest_checkpointed_iteration.txt").read_text().strip()


def weights(directory: Path, iteration: int = 30) -> dict[str, bytes]:
    """The tensors of a checkpoint, as bytes."""
    files = (directory / f"iter_{iteration:07d}").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def said_by_all(ranks: Run) -> list[str]:
    """The stderr of the two ranks of a run."""
    return [line for rank in range(2) for line in ranks.err(rank).splitlines()]


def in_micro_batch(number: int, act: Callable[[], object]) -> None:
    """`act` is called as a rank begins this micro-batch of its training."""
    accumulate, begun = ZeroEngine.accumulate, 0

    def acting(engine: ZeroEngine, *arguments: object, **more: object) -> torch.Tensor:
        nonlocal begun
        begun += 1
        if begun == number:
            act()
        return accumulate(engine, *arguments, **more)

    ZeroEngine.accumulate = acting


def two_ranks(directory: Path, *flags: str) -> Run:
    """Both ranks started with these flags."""
    run = Run(directory, 2)
    for rank in range(2):
        run.start(rank, *flags)
    return run


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of an undisturbed run of two ranks."""
    from tests.train.conftest import BYTES, TINY

    save = tmp_path_factory.mktemp("whole")
    flags = ["--data-path", corpus, "--split", "80,10,10", *BYTES, *TINY, *LENGTH, "--eval-iters", "0"]
    with two_ranks(save / "log", *flags, "--save", str(save)) as ranks:
        assert ranks.statuses() == {0: 0, 1: 0}, ranks.err(0)
    return save


@pytest.mark.nightly
def test_a_request_to_stop_waits_until_the_imports_are_done(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "pretrain_gpt.py", *SMALLEST, "--train-iters", "100000"]
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        status = Path(f"/proc/{run.pid}/status")
        blocked = partial(re.search, r"SigBlk:\s*0*200$", flags=re.MULTILINE)  # USR1 alone
        wait_until(lambda: blocked(status.read_text()), 60, every=0.002)
        run.send_signal(signal.SIGUSR1)
        out, _ = run.communicate(timeout=100)
    assert run.returncode == 75, out
    assert "exiting at iteration 2: SIGUSR1" in out  # the vote after the first step, at the next one


def test_a_signal_to_one_rank_saves_and_stops_all(flags: list[str], whole: Path, tmp_path: Path) -> None:
    """During an evaluation, then during steps; the third start ends with the weights of a whole run."""
    save = tmp_path / "checkpoints"
    flags = [*flags, *LENGTH, "--save", str(save), "--load", str(save)]
    with two_ranks(tmp_path / "1", *flags, "--eval-iters", "100000") as ranks:
        ranks.wait_for("starting from initial weights")
        for rank in range(2):  # as srun does
            ranks.send(rank, signal.SIGUSR1)
        assert ranks.statuses() == {0: 75, 1: 75}, ranks.err(0)
        assert "exiting at iteration 0: SIGUSR1\n" in ranks.out(0)
        assert said_by_all(ranks) == [f"{NODE}: got SIGUSR1: stopping after this step and saving"]
    flags += ["--eval-iters", "0"]
    with Run(tmp_path / "2", 2) as ranks:
        ranks.start(0, *flags)
        ranks.start(
            1, *flags, change=partial(in_micro_batch, 7, partial(signal.raise_signal, signal.SIGTERM))
        )
        assert ranks.statuses() == {0: 75, 1: 75}, ranks.err(0)
        assert f"exiting at iteration {newest(save)}: SIGTERM\n" in ranks.out(0)
        assert said_by_all(ranks) == [f"{NODE}: got SIGTERM: stopping after this step and saving"]
    with two_ranks(tmp_path / "3", *flags) as ranks:
        assert ranks.statuses() == {0: 0, 1: 0}, ranks.err(0)
        assert "resuming at iteration" in ranks.out(0)
    assert weights(save) == weights(whole)


def test_a_second_signal_ends_a_rank_at_once(flags: list[str], tmp_path: Path) -> None:
    """Even if the main thread waits in a collective for a stopped rank. The first signal is answered."""
    flags = [*flags, *LENGTH, "--train-iters", "100000", "--eval-iters", "0"]
    with two_ranks(tmp_path / "log", *flags) as ranks:
        ranks.wait_for("iteration        5/")
        ranks.send(1, signal.SIGSTOP)
        ranks.send(0, signal.SIGINT)
        promise = "stopping after this step; nothing is saved without --save; press again to end now\n"
        wait_until(lambda: ranks.err(0) == f"{NODE}: {promise}")
        assert not ended_in(ranks, 0.5)  # what comes within a second is the same request
        while not ended_in(ranks, 1.2):  # on a busy machine the first one may have come late
            ranks.send(0, signal.SIGINT)
        assert ranks.processes[0].exitcode == 130
        again = "SIGINT again: ends at once, nothing is saved\n"
        assert ranks.err(0) == f"{NODE}: {promise}{NODE}: {again}"


def without_a_reader() -> None:
    """Let stdout be a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def test_a_run_whose_log_nobody_reads_says_so(flags: list[str], tmp_path: Path) -> None:
    """`| tee log`, and tee is killed: the line names stdout, not only a broken pipe."""
    with Run(tmp_path, 1) as ranks:
        ranks.start(0, *flags, "--train-iters", "3", change=without_a_reader)
        assert ranks.statuses() == {0: 1}
    said = "stdout: what read it has ended; write the log to a file and read that"
    assert ranks.errors() == [f"pretrain_gpt.py: error: {said}"]


def into_a_pipe(room: int) -> None:
    """Let stdout be a pipe that nobody reads, with room for so many bytes."""
    _, writer = os.pipe()
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) - room))
    os.dup2(writer, 1)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        nightly("loading, report", " torch "),  # after what gloo of torch 2.8 writes as ranks connect
        ("step 1, report", " iteration        1/"),
        nightly("saves iteration 1, report", " saved "),
    ],
)
def test_a_full_pipe_ends_the_run(flags: list[str], tmp_path: Path, where: str, line: str) -> None:
    """Rank 0 waits for a reader of its log, in a part of this line, and the other rank for rank 0."""
    flags = [*flags, "--train-iters", "3", "--log-interval", "1", "--eval-iters", "0", "--num-workers", "0"]
    flags += ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    with two_ranks(tmp_path / "whole", *flags) as ranks:
        assert ranks.statuses() == {0: 0, 1: 0}, ranks.err(0)
        room = ranks.out(0).index(line) + len(line) + 1
    shutil.rmtree(tmp_path / "checkpoints")
    with Run(tmp_path / "log", 2) as ranks:
        flags += ["--heartbeat-timeout", "4"]
        ranks.start(0, *flags, change=partial(into_a_pipe, room))
        ranks.start(1, *flags)
        assert set(ranks.statuses(100).values()) == {1}
        said = ranks.errors()
    assert said
    stuck = rf"error: rank 0 \[.*\] stuck for \d+ s; last seen: {where} "
    assert all(re.search(stuck, one) for one in said), said


def ended_in(ranks: Run, seconds: float) -> bool:
    """Whether rank 0 ends in so many seconds."""
    ranks.processes[0].join(seconds)
    return ranks.processes[0].exitcode is not None


def test_losses_that_are_not_finite_stop_the_run(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 4 are finite; 5 to 14 are skipped and end the run, one step later."""
    poison_losses(monkeypatch, float("inf"))
    saves = ["--save", str(tmp_path), "--save-interval", "4", "--eval-iters", "0"]
    ending = train_here([*flags, "--train-iters", "100", *saves])
    assert (ending.iteration, ending.stop.status) == (15, 3)
    assert str(ending.stop).startswith("the 10 steps up to iteration 14 had NaN or Inf in loss or gradients")
    assert newest(tmp_path) == "15"
    assert weights(tmp_path, 15) == weights(tmp_path, 4)


@pytest.mark.parametrize("evaluations", ["0", "2"])
def test_losses_that_are_not_finite_up_to_the_end_are_a_failure(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, evaluations: str
) -> None:
    """A step learns what became of the one before. The last has none behind it, the 13th an evaluation."""
    poison_losses(monkeypatch, float("nan"))
    ending = train_here([*flags, "--train-iters", "14", "--eval-iters", evaluations, "--eval-interval", "13"])
    assert (ending.iteration, ending.stop.status) == (14, 3)
    assert "up to iteration 14 had" in str(ending.stop)


def poison_losses(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """From the fifth step on."""
    healthy, micro_batches = ZeroEngine._loss, 0

    def loss(engine: ZeroEngine, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal micro_batches
        micro_batches += engine.model.training
        return healthy(engine, tokens) + (value if micro_batches > 4 else 0.0)

    monkeypatch.setattr(ZeroEngine, "_loss", loss)


def fail() -> None:
    raise ValueError("token 5 is outside")


def test_an_error_reaches_the_others_before_logs_are_closed(flags: list[str], tmp_path: Path) -> None:
    """Rank 0's metrics file is a FIFO that nobody reads yet; it would be given up after 30 s."""
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    flags = [*flags, *LENGTH, "--eval-iters", "0", "--save", str(tmp_path / "saved")]
    flags += ["--metrics-file", str(pipe)]
    with Run(tmp_path / "log", 2) as ranks:
        ranks.start(0, *flags, change=partial(in_micro_batch, 3, fail))
        ranks.start(1, *flags)
        wait_until(lambda: "rank 0" in ranks.err(1))
        assert ranks.processes[0].is_alive()  # it waits for the FIFO
        assert ranks.err(0) == ""
        ranks.send(0, signal.SIGTERM)  # as a launcher does when another rank has ended
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        assert ranks.statuses() == {0: 1, 1: 1}
        assert ranks.err(0) == f"pretrain_gpt.py [{platform.node()} rank 0]: error: token 5 is outside\n"
        failed = f"[{platform.node()} rank 1]: error: rank 0 [{platform.node()}] failed: token 5"
        assert failed in ranks.err(1)
    os.close(reader)


def damaged(topology: Topology) -> list[tuple[int, int | None, bool, str]]:
    """(iteration, exit status, whether the run saves, stderr) of each check that ended the run.

    A bit of rank 1's reference flips after the second of three steps, each of which is saved.
    """
    engine, found = build(topology, FOUR_BITS), []
    stops = StopConditions(TrainingConfig(micro_batch_size=1, train_iters=4), engine, StopSignals())
    for iteration in range(3):
        train(engine, range(iteration, iteration + 1))
        if topology.rank == 1 and iteration == 1:
            engine.evaluate(torch.zeros(2, 11, dtype=torch.long))  # waits for the exchange
            engine.units[0].reference.view(torch.int32)[3] ^= 1 << 22
        try:
            stops.before_save()
        except Stop as stop:
            said = io.StringIO()
            with redirect_stderr(said), pytest.raises(SystemExit) as exited:
                Ending(iteration, stop, lost_sinks=False).leave("pretrain_gpt.py", topology.rank)
            found.append((iteration, exited.value.code, stop.saves, said.getvalue()))
    engine.close()
    return found


def test_a_damaged_reference_ends_the_run_at_the_next_save() -> None:
    first, second = on_ranks(2, damaged, ranks_per_node=1)
    assert [check[:3] for check in first] == [check[:3] for check in second] == [(1, 1, False), (2, 1, False)]
    said = first[0][3]
    assert said.startswith(
        "pretrain_gpt.py: error: iteration 1: the reference of weight differences is not that of node 0 in "
        "unit 0 (with "
    )
    assert " on ranks 1: memory or the network changed it; nothing is saved; resume from" in said
    assert (said.count("\n"), second[0][3]) == (1, "")  # rank 0 speaks for all


SHARDED = [*SMALLEST, *"--hidden-size 64 --lr 3e-3 --device cpu --zero-stage 3".split()]
FORMATS = (
    "--zero-hpz-partition-size auto --zero-quantized-weights --zero-quantized-weights-format delta4 "
    "--zero-quantized-gradients --zero-quantized-gradients-format rotated4"
)


def on_two_nodes(directory: Path, *flags: str) -> None:
    """Of one rank each."""
    with Run(directory, 2) as run:
        for rank in (0, 1):
            run.start(rank, *SHARDED, *flags, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        assert run.statuses() == {0: 0, 1: 0}, run.errors()


def test_a_stopped_and_resumed_finetuning_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Signs of rotated gradients are counted from the finetuning's start."""
    base, whole, halves = (str(tmp_path / name) for name in ("base", "whole", "halves"))
    on_two_nodes(tmp_path / "0", "--train-iters", "5", "--save", base)
    flags = [*FORMATS.split(), "--train-iters", "4"]
    on_two_nodes(tmp_path / "1", *flags, "--finetune", "--load", base, "--save", whole)
    on_two_nodes(
        tmp_path / "2", *flags, "--finetune", "--load", base, "--save", halves, "--exit-interval", "2"
    )
    on_two_nodes(tmp_path / "3", *flags, "--load", halves, "--save", halves)
    first, second = (weights(Path(run), 4) for run in (whole, halves))
    assert len(first) == 2
    assert first == second
