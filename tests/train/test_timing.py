"""Where the time of steps goes: the slow rank is named, parts add up, and the trace opens."""

import gzip
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_zpp.commands.report import ReportConfig, make_report
from megatron_zpp.config.run import TimingConfig
from megatron_zpp.reporting.metrics import Stopwatch
from megatron_zpp.reporting.profile import StepProfiler
from megatron_zpp.reporting.timing import straggler_line, times_line
from megatron_zpp.train.steps.step_log import StepLog
from megatron_zpp.zero.sections import Sections
from tests.config.command_line import SMALLEST
from tests.support import Run, pretrain, program, records_of, trained
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST as ONE_LAYER
from tests.train.in_process import train_here


def sleep_in_every_forward() -> None:
    """As on a host whose processors another program uses."""
    from megatron_zpp.model.gpt import GPT

    forward = GPT.forward

    def slow(model: GPT, *arguments: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return forward(model, *arguments)

    GPT.forward = slow


def test_the_slow_rank_is_named_and_a_step_is_taken_apart(flags: list[str], tmp_path: Path) -> None:
    flags += ["--train-iters", "6", "--log-interval", "3", "--eval-iters", "0", "--zero-stage", "3"]
    flags += ["--timing-log-level", "2", "--log-straggler", "--metrics-file", str(tmp_path / "metrics.jsonl")]
    flags += ["--profile", "--profile-step-start", "2", "--profile-step-end", "4"]
    flags += ["--profile-ranks", "1", "7"]
    with Run(tmp_path, 3) as run:
        for rank in range(3):
            slow = sleep_in_every_forward if rank == 1 else None
            run.start(rank, *flags, "--tensorboard-dir", str(tmp_path / "events"), change=slow)
        assert run.statuses() == {0: 0, 1: 0, 2: 0}
        out, errors = run.out(0), run.err(0)
    assert out.count("on rank 1: rank 1 is the slowest\n") == 2
    last = records_of(tmp_path / "metrics.jsonl")[-1]
    assert last["straggler_rank"] == 1
    assert last["straggler_busy_ms"] > 500
    assert last["time_forward_ms"] > 500
    parts = ("batch_generator", "forward_backward", "optimizer")
    assert max(last[f"time_{part}_ms"] for part in parts) <= last["elapsed_ms"]
    assert re.search(r"\(min, max\) time across ranks \(ms\): batch-generator: \(\d+\.\d\d, \d", out)

    traces = tmp_path / "events" / "profile"
    assert f" wrote traces of steps 2 to 3 to {traces}\n" in out
    assert "warning: --profile-ranks 1 7: this run has ranks 0 to 2" in errors
    (trace,) = traces.iterdir()
    assert trace.name == "rank1.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    forwards = [event for event in events if event.get("name") == "aten::embedding"]
    assert len(forwards) == 4  # tokens and positions, two steps


def test_a_run_that_ends_during_a_trace_writes_it(tmp_path: Path) -> None:
    """A process that exits while torch records a trace crashes, whatever its last line was."""
    flags = "--train-iters 29 --lr 1e30 --device cpu --profile --profile-step-start 2 --profile-step-end 29"
    done = pretrain(*SMALLEST, *flags.split(), "--tensorboard-dir", str(tmp_path))
    assert done.returncode == 3, done.stderr
    last, traces = int(re.search(r"error: iteration (\d+)", done.stderr)[1]), tmp_path / "profile"
    assert f" wrote traces of steps 2 to {last} to {traces}\n" in done.stdout
    assert json.loads(gzip.decompress((traces / "rank0.trace.json.gz").read_bytes()))["traceEvents"]


def test_a_run_that_resumes_inside_the_steps_of_a_trace_records_the_rest(tmp_path: Path) -> None:
    """Before and behind these steps nothing is recorded, which is said of a run that has none of them."""
    config = TimingConfig(profile=True, profile_step_start=2, profile_step_end=5, profile_ranks=(1,))
    for rank, first in ((0, 3), (1, 3), (1, 1), (1, 5)):
        profiler, found = StepProfiler(config, tmp_path, rank, torch.device("cpu")), []
        for step in range(first, 8):
            profiler.before_step(step)
            if profiler.ends_after(step):
                found.append(profiler.end(step))
        assert found == ([] if first == 5 else [f" wrote traces of steps {max(first, 2)} to 4 to {tmp_path}"])
        assert not profiler.is_open
        said = " --profile records nothing: its steps are 2 to before 5, and this run takes 5 to 7"
        assert profiler.misses(range(first, 8)) == (said if first == 5 else None)
    assert [bool(profiler.misses(range(1, end))) for end in (2, 3)] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.trace.json.gz"]


def test_lines() -> None:
    assert times_line({"a": [1.0, 2.0], "b": [3.0, 0.5]}) == (
        " (min, max) time across ranks (ms): a: (1.00, 2.00) | b: (0.50, 3.00)"
    )
    assert straggler_line([10.0, 11.0, 10.0, 20.0], [25.0] * 4, 1) == (
        " busy of 25.0 ms per step: median 10.5 ms, least 10.0 ms, most 20.0 ms on rank 3: "
        "rank 3 is the slowest"
    )
    assert straggler_line([10.0, 10.5], [25.0] * 2, 1).endswith("on rank 1: no rank stands out")
    group = "one of ranks 2 to 3, which wait for each other inside layers, is the slowest"
    assert straggler_line([10.0, 11.0, 19.0, 20.0], [25.0] * 4, 2).endswith(f"on rank 3: {group}")
    assert straggler_line([20.0, 20.5], [25.0] * 2, 2).endswith("so the slowest cannot be named")


def test_sections_add_up_and_are_reset() -> None:
    sections = Sections(torch.device("cpu"))
    for _ in range(2):
        with sections("outer"), sections("inner"):
            time.sleep(0.01)
    with sections.paused(), sections("evaluation"):
        pass
    taken = sections.take()
    assert list(taken) == ["outer", "inner"]
    assert taken["outer"] >= taken["inner"] >= 0.02
    assert sections.take() == {"outer": 0.0, "inner": 0.0}
    with pytest.raises(ValueError, match="x"), Sections()("outer"):
        raise ValueError("x")


def test_a_report_compares_the_run_with_its_plan(tmp_path: Path) -> None:
    """Of two data ranks, of two tensor ranks each."""
    metrics, save = str(tmp_path / "metrics.jsonl"), str(tmp_path / "save")
    flags = "--mock-data --train-iters 4 --eval-iters 1 --zero-stage 3 --timing-log-level 1 ".split()
    flags += ["--tensor-model-parallel-size", "2", *BYTES, *TINY, "--metrics-file", metrics]
    trained(*flags, "--save", save, processes=4)
    report = make_report(ReportConfig(metrics=metrics, checkpoint=save))
    assert report.iterations == 4
    assert [note for _, _, _, note in report.traffic] == ["equal", "equal"]
    _, _, measured, _ = report.traffic[1]
    assert int(measured.replace(",", "")) > 0
    assert report.memory[-1][0] == "peak"
    assert ("--zero-stage", "3", True) in [(each.flag, each.value, each.changed) for each in report.settings]
    page = tmp_path / "new" / "report.html"
    more = ("--x", "tokens", "--output", page)
    done = program("megatron_zpp.commands.report", metrics, "--checkpoint", save, *more)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    for said in ("--zero-stage 3", "forward backward", "inside nodes", "on a CPU the whole process"):
        assert said in text


def test_an_evaluation_takes_no_time_of_the_step_before(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU still computes that step when the host has submitted it; a save waits for it as well."""
    engine, interval = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(iterations=1)
    log = SimpleNamespace(_engine=engine, _interval=interval, watch=Stopwatch())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(0.01))
    StepLog.settle(log)
    assert log.watch.total() >= 0.01
    settled: list[int] = []
    monkeypatch.setattr(StepLog, "settle", lambda log: settled.append(log._interval.iterations))
    train_here(
        [*flags, *ONE_LAYER, *"--eval-iters 1 --eval-interval 2 --train-iters 3 --log-interval 9".split()]
    )
    assert settled == [
        0,
        2,
        0,
        0,
        0,
    ]  # evaluations at 0 and 2; behind the last step a save and two evaluations
