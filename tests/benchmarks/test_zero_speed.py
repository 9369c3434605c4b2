"""The driver of zero_speed.py: failures are recorded, calls resume, shared GPUs are said."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import zero_speed
from benchmarks.contest import grid
from benchmarks.contest.launch import Outcome, run_on_nodes
from benchmarks.contest.summary import tables

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 128".split()
NAMES = ["stage_3", "fsdp2_bf16", "fsdp2_fp32"]
MILLISECONDS = {"stage_3": 10.0, "--reduce bf16": 20.0, "--reduce fp32": 30.0}


class Nodes:
    """Stands for run_on_nodes: every contestant takes its time, `failing` fails, and calls are counted."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.calls: list[str] = []
        self.environments: list[dict[str, str]] = []

    def __call__(
        self, module: str, arguments: list[str], environments: list[dict[str, str]], ranks: int, limit: float
    ) -> Outcome:
        said = " ".join(arguments)
        name = next((name for name in MILLISECONDS if name in said), "links")
        self.calls.append(name)
        self.environments = environments
        if name in self.failing:
            return Outcome(1.0, "node 1 failed with status 1\nnode 1: out of luck")
        report: dict[str, Any] = {"all_gather": {"25MB": 3.3}}
        if name != "links":
            report = {"step_ms": [MILLISECONDS[name]] * 3, "loopback_bytes_per_step": 5, "losses": [9.0, 8.0]}
        Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))
        return Outcome(1.0, None)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()
    monkeypatch.setattr(zero_speed, "run_on_nodes", nodes)
    monkeypatch.setattr(grid, "visible_gpus", lambda: ["0", "1"])
    return nodes


def contest(directory: Path, *more: str, ranks: int = 1) -> zero_speed.Contest:
    argv = [*SHAPE, "--nodes", "2", "--ranks-per-node", str(ranks), "--rounds", "2", "--contestants", *NAMES]
    return zero_speed.Contest(zero_speed.parse([*argv, "--output", str(directory), *more]))


def test_contestants_take_turns_and_ratios_are_to_the_fastest_peer(nodes: Nodes, tmp_path: Path) -> None:
    run = contest(tmp_path, "--nccl", "4sockets")
    assert run.run()
    assert nodes.calls == ["links", *MILLISECONDS] * 2
    assert [each["CUDA_VISIBLE_DEVICES"] for each in nodes.environments] == ["0", "1"]
    assert {each["NCCL_NSOCKS_PERTHREAD"] for each in nodes.environments} == {"2"}
    result = json.loads(run.path.read_text())
    figures = result["figures"]
    assert (figures["gpu_map"], figures["shared_gpu"]) == ([["0"], ["1"]], False)
    assert figures["strongest_peers"] == {"fsdp2": "fsdp2_bf16"}
    row = figures["contestants"]["stage_3"]
    assert (row["milliseconds"], row["interval_ms"], row["rate_over_fsdp2"]) == (10.0, [10.0, 10.0], 2.0)
    assert figures["links"]["gigabytes_per_second"] == {"all_gather": {"25MB": 3.3}}
    assert "| ours, stage 3 | 10.0 | 10.0–10.0 | 10.0 10.0 | 2.0 |" in tables([result])


def test_a_failure_is_recorded_and_the_others_run(nodes: Nodes, tmp_path: Path) -> None:
    nodes.failing = {"--reduce bf16"}
    run = contest(tmp_path)
    assert run.run()
    rows = json.loads(run.path.read_text())["figures"]["contestants"]
    assert "out of luck" in rows["fsdp2_bf16"]["failed"]
    assert len(rows["fsdp2_fp32"]["rounds"]) == 2
    nodes.calls.clear()
    assert contest(tmp_path).run()
    assert nodes.calls == []  # what failed is left alone
    nodes.failing = set()
    assert contest(tmp_path, "--retry-failed").run()
    assert nodes.calls == ["--reduce bf16"] * 2


def test_a_call_that_was_cut_off_resumes(nodes: Nodes, tmp_path: Path) -> None:
    first = contest(tmp_path)
    first._fits = lambda name: len(nodes.calls) < 3
    assert not first.run()
    assert nodes.calls == ["links", "stage_3", "--reduce bf16"]
    assert not contest(tmp_path, "--limit-seconds", "10").run()  # what has not run may take longer
    assert contest(tmp_path).run()
    assert nodes.calls == ["links", *MILLISECONDS] * 2
    with pytest.raises(SystemExit, match="settings"):
        contest(tmp_path, "--steps", "77")


def test_failures_and_time_limits_of_processes_are_reported() -> None:
    failed = run_on_nodes("benchmarks.no_such_module", [], [{}], 1, limit_seconds=60)
    assert "failed with status 1" in failed.failed
    assert "no_such_module" in failed.failed
    late = run_on_nodes("http.server", ["0"], [{}], 1, limit_seconds=0.2)
    assert late.failed.startswith("ran past its time limit")
    assert late.seconds < 30
