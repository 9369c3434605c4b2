"""Campaigns of emulated runs: what is run next, what a resumed one repeats, and the intervals of its gaps."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import convergence, paired_runs
from benchmarks.emulation.descent import Ladder, descend
from benchmarks.intervals import mean_and_interval, t_quantile


def test_intervals_against_tables_of_the_t_distribution() -> None:
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (15, 2.1314), (63, 1.9983), (1000, 1.9623)):
        assert t_quantile(freedom, 0.975) == pytest.approx(quantile, abs=1e-4)
    assert mean_and_interval([2.0]) == (2.0, None)
    mean, half_width = mean_and_interval([1.0, 2.0, 3.0, 4.0])
    assert (mean, half_width) == (2.5, pytest.approx(3.1824 * 1.2910 / 2, abs=1e-3))


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The jobs that were run, in a thread: their losses follow from rung and seed."""
    jobs: list[tuple[str, int]] = []

    def run(settings: dict[str, object], device: str, text: None, job: tuple[str, int]) -> dict[str, object]:
        jobs.append(job)
        loss = (1.001 if job[0] == "delta4" else 1.0) * (4 + job[1])
        bytes_ = {"bytes_per_parameter": 1.0, "bytes_per_parameter_in_layers": 1.0}
        return {"loss": loss, "master_loss": loss, "seconds": 0.0, "skipped": 0, **bytes_}

    monkeypatch.setattr(convergence, "_run", run)
    monkeypatch.setattr(paired_runs, "ProcessPoolExecutor", lambda count, *_: ThreadPoolExecutor(count))
    return jobs


def test_a_campaign_resumes_where_it_was(
    tmp_path: Path, fake_runs: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    arguments = ["--size", "tiny", "--rungs", "delta4", "--device", "cpu", "--output", str(tmp_path)]
    arguments += ["--runs-file", str(path)]
    assert convergence.main([*arguments, "--pairs", "2", "--limit-seconds", "0"]) == convergence.STOPPED
    assert not fake_runs
    assert convergence.main([*arguments, "--pairs", "2"]) == 0
    assert fake_runs == [("baseline", 0), ("delta4", 0), ("baseline", 1), ("delta4", 1)]
    raw = path.read_bytes()
    path.write_bytes(raw[:-20])  # killed while it wrote the last line, before the result
    (tmp_path / "emulation_tiny_cpu.json").unlink()
    fake_runs.clear()
    assert convergence.main([*arguments, "--pairs", "3", "--processes", "2"]) == 0
    assert sorted(fake_runs) == [("baseline", 2), ("delta4", 1), ("delta4", 2)]
    gap = json.loads((tmp_path / "emulation_tiny_cpu.json").read_text())["figures"]["rungs"]["delta4"]
    assert gap["gap"] == {"mean_percent": 0.1, "half_width_95_percent": 0.0, "by_seed": [0.1] * 3}
    assert "| delta4 | 1.000 | 3 | +0.100 | 0.000 | +0.100 … +0.100 |" in capsys.readouterr().out
    fake_runs.clear()
    others = [*arguments, "--pairs", "1", "--steps", "7", "--name", "others"]
    assert convergence.main(others) == 0  # other settings, other runs
    assert len(fake_runs) == 2


def test_a_call_never_takes_pairs_from_a_result(
    tmp_path: Path, fake_runs: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--size", "tiny", "--rungs", "delta4", "--device", "cpu", "--output", str(tmp_path)]
    here, elsewhere = (["--runs-file", str(tmp_path / f"{name}.jsonl")] for name in ("here", "elsewhere"))
    result = tmp_path / "emulation_tiny_cpu.json"
    assert convergence.main([*arguments, *here, "--pairs", "2"]) == 0
    written = result.read_bytes()
    fake_runs.clear()
    for refused, message in (
        ([*elsewhere, "--pairs", "2"], "has 2 pairs of 'baseline', of which --runs-file lacks 2"),
        ([*here, "--pairs", "2", "--steps", "7"], "has runs with other settings: give another --name"),
    ):
        assert convergence.main([*arguments, *refused]) == 2
        assert message in capsys.readouterr().err
    assert not fake_runs
    assert result.read_bytes() == written
    assert convergence.main([*arguments, *here, "--pairs", "1"]) == 0  # fewer pairs than there are runs
    assert json.loads(result.read_text())["figures"]["rungs"]["delta4"]["pairs"] == 2
    assert convergence.main([*arguments, *elsewhere, "--pairs", "1", "--name", "small"]) == 0
    assert fake_runs == [("baseline", 0), ("delta4", 0)]


def test_a_seed_is_begun_if_all_of_its_runs_can_end(
    tmp_path: Path, fake_runs: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [("baseline", 2), ("delta4", 2), ("baseline", 3), ("delta4", 3)]
    for begun, under_way, processes, rounds in (
        ({2}, 0, 1, 1),
        ({1}, 0, 1, 2),
        ({1}, 0, 2, 1),
        ({1}, 1, 2, 2),
        ({1}, 3, 4, 2),
    ):
        assert paired_runs.rounds_needed(waiting, begun, under_way, processes) == rounds
    arguments = ["--size", "tiny", "--rungs", "delta4", "--device", "cpu", "--output", str(tmp_path)]
    arguments += ["--runs-file", str(tmp_path / "runs.jsonl"), "--pairs", "3"]
    now = iter(range(10_000))
    quick = convergence._run

    def slow(*arguments: Any) -> dict[str, object]:
        return quick(*arguments) | {"seconds": 10.0}

    monkeypatch.setattr(convergence, "_run", slow)
    clock = SimpleNamespace(monotonic=lambda: 10.0 * next(now))  # called before each run
    monkeypatch.setattr(paired_runs, "time", clock)  # not torch's or other threads' too
    assert convergence.main([*arguments, "--limit-seconds", "44"]) == convergence.STOPPED
    assert fake_runs == [("baseline", 0), ("delta4", 0)]
    assert convergence.main([*arguments, "--limit-seconds", "1000"]) == 0
    assert fake_runs[2:] == [(name, seed) for seed in (1, 2) for name in ("baseline", "delta4")]


def test_a_descent_goes_over_single_and_joint_steps_to_the_lowest_point() -> None:
    """Of a bowl whose axes are turned, asked star by star; NaN is no better than anything."""
    ladders = [Ladder(tuple(range(12)), 2, 2), Ladder(tuple(range(6)), 1)]

    def bowl(point: tuple[int, ...]) -> float:
        x, y = point
        return math.nan if x == 11 else 5 + (x - 7) ** 2 + (y - 3) ** 2 + 0.5 * (x - 7) * (y - 3)

    known: dict[tuple[int, ...], float] = {}
    rounds = 0
    while wanted := (found := descend(ladders, (2, 1), known.get, 0.001)).wanted:
        assert not set(wanted) & set(known)
        known.update({point: bowl(point) for point in wanted})
        rounds += 1
    assert (found.path[0], found.best) == ((2, 1), (7, 3))
    assert rounds < 10
    assert len(known) < 40  # of 72
    flat = descend(ladders, (2, 1), lambda point: 5.0 - 0.002 * point[0], 0.001)
    assert flat.path == ((2, 1),)  # two places give less than a thousandth


def test_a_campaign_tunes_optimizers_and_compares_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then pairs take the best settings; a second call repeats nothing."""
    jobs: list[tuple[str, int]] = []

    def run(settings: dict[str, Any], device: str, text: None, job: tuple[str, int]) -> dict[str, Any]:
        jobs.append(job)
        settings = convergence.named(settings, job[0])[0]
        islands = settings.get("islands")
        best, scale = (8e-3, 1.0) if "muon" in settings else (4e-3, 1.2)
        loss = 2 + abs(math.log(settings["lr"] / best)) + scale * (1 - settings["steps"] / 80)
        if islands:
            loss += 0.01 + abs(islands["lr"] - 0.9) + abs(islands["momentum"] - 0.6)
            loss += 0.1 * (islands.get("overlap", 0) - (islands.get("count") == 1))
        bytes_ = {"bytes_per_parameter": 1.0, "bytes_per_parameter_in_layers": 1.0}
        return {"loss": loss + job[1], "master_loss": loss, "seconds": 0.0, "skipped": 0, **bytes_}

    monkeypatch.setattr(convergence, "_run", run)
    monkeypatch.setattr(paired_runs, "ProcessPoolExecutor", lambda count, *_: ThreadPoolExecutor(count))
    arguments = ["--size", "tiny", "--device", "cpu", "--output", str(tmp_path), "--pairs", "2"]
    tune = [*arguments, "--descend", "adamw", "muon", "--runs-file", str(tmp_path / "tuned.jsonl")]
    assert convergence.main([*tune, "--limit-seconds", "0"]) == convergence.STOPPED
    assert not jobs
    assert convergence.main(tune) == 0
    assert len(set(jobs)) == len(jobs)
    path = tmp_path / "descent_tiny_cpu.json"
    figures = json.loads(path.read_text())["figures"]
    assert figures["adamw"]["settings"]["lr"] == 4e-3
    assert figures["muon"]["settings"]["lr"] == 8e-3
    assert figures["muon"]["settings"]["muon"]["momentum"] == 0.95
    share = figures["share_of_tokens"]  # 40 of 80 steps cost Muon 0.5, and AdamW 0.6
    assert share["mean"] == pytest.approx(0.8)
    assert share["half_width_95"] == pytest.approx(0, abs=1e-6)
    jobs.clear()
    assert convergence.main(tune) == 0
    assert not jobs
    pairs = [*arguments, "--tuned", str(path), "--rungs", "sums4", "--name", "pairs"]
    assert convergence.main([*pairs, "--runs-file", str(tmp_path / "pairs.jsonl")]) == 0
    assert json.loads((tmp_path / "pairs.json").read_text())["figures"]["settings"]["lr"] == 8e-3
    outer = tmp_path / "outer.json"
    islands = [*arguments, "--descend", "islands", "--tuned", str(path), "--name", "outer"]
    assert convergence.main([*islands, "--runs-file", str(tmp_path / "outer.jsonl")]) == 0
    found = json.loads(outer.read_text())["figures"]["islands"]["settings"]
    assert found == {"islands": {"lr": 0.9, "momentum": 0.6}, "lr": 8e-3}
    gate = [*arguments, "--tuned", str(path), str(outer), "--name", "gate", "--rungs"]
    gate += ["2 islands", "2 islands, overlap 1", "1 island"]
    gate += ["--pairs", "8", "--runs-file", str(tmp_path / "gate.jsonl")]
    assert convergence.main([*gate, "--limit-seconds", "0"]) == convergence.STOPPED
    assert convergence.main(gate) == 0
    jobs.clear()
    assert convergence.main(gate) == 0
    assert not jobs
    larger = [*tune, "--tuned", str(path), "--steps", "160", "--name", "larger"]
    assert convergence.main(larger) == 0
    found = json.loads((tmp_path / "larger.json").read_text())["figures"]["muon"]["path"]
    assert json.loads(found[0][0])["lr"] == 8e-3
    printed = capsys.readouterr().out
    assert "| sums4 | 1.000 | 2 |" in printed
    assert "2 islands: passes: upper end +0.284%, at most 0.5% with Muon" in printed
    assert "2 islands, overlap 1: fails: upper end" in printed
    assert "1 island: passes: better in 8 pairs of 8" in printed
