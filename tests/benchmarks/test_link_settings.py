"""Rates of the link by NCCL's settings: each setting in separate processes, and one table of all."""

import json
from pathlib import Path

import pytest

from benchmarks import link_settings
from benchmarks.contest import grid
from benchmarks.contest.launch import Outcome
from benchmarks.contest.link_rates import CASES, DEFAULT_CASES
from tests.support import program

ARGUMENTS = ["--settings", "default", "4sockets_chunk512", "--megabytes", "25", "100"]


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environment of node 1 in each call of the stand-in for run_on_nodes."""
    called: list[dict[str, str]] = []

    def run_on_nodes(
        module: str, arguments: list[str], nodes: list[dict[str, str]], ranks: int, limit: float
    ) -> Outcome:
        assert (module, len(nodes), ranks) == ("benchmarks.contest.link_rates", 2, 1)
        called.append(nodes[1])
        if len(called) == 2:
            return Outcome(1.0, "node 1 failed with status 1: out of luck\nat length")
        rates = {case: {"25MB": 2.0, "100MB": 4.0} for case in CASES}
        rates["all_to_all"] = {"25MB": 1.4, "100MB": 4.0}
        Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(rates))
        return Outcome(1.0, None)

    monkeypatch.setattr(link_settings, "run_on_nodes", run_on_nodes)
    monkeypatch.setattr(grid, "visible_gpus", lambda: ["0", "1"])
    return called


def test_each_setting_is_measured_once(environments: list[dict[str, str]], tmp_path: Path) -> None:
    """A call that ran out of time resumes, and a setting that failed is measured again."""
    options = link_settings.parse([*ARGUMENTS, "--output", str(tmp_path)])
    options.limit_seconds = 0
    assert not link_settings.measure(options)[1]
    assert environments == []
    options.limit_seconds = 600
    figures, complete = link_settings.measure(options)
    assert complete
    assert link_settings.table(figures).splitlines()[-1] == (
        "| 4sockets_chunk512 | node 1 failed with status 1: out of luck |"
    )
    figures, complete = link_settings.measure(options)
    default, first, again = environments
    assert "NCCL_P2P_NET_CHUNKSIZE" not in default
    assert first == again
    assert (again["NCCL_P2P_NET_CHUNKSIZE"], again["NCCL_NSOCKS_PERTHREAD"]) == ("524288", "2")
    head, _, titles, _, *rows = link_settings.table(figures).splitlines()
    assert head == "GB/s that a rank sends, in messages of 25 / 100 MB"
    assert titles.startswith("| setting | all gather | reduce scatter | all to all |")
    assert rows[0].startswith("| default | 2.00 / 4.00 | 2.00 / 4.00 | 1.40 / 4.00 |")
    assert rows[0].endswith("| 70% / 100% |")
    assert len(rows) == 2
    other = link_settings.parse(["--megabytes", "1", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="other cases, sizes or GPUs"):
        link_settings.measure(other)


def test_collectives_are_timed_between_nodes(tmp_path: Path) -> None:
    """Over gloo, on two emulated nodes; the driver of zero_speed.py asks for the first four only."""
    reported = tmp_path / "report.json"
    argv = ["--nodes", "2", "--megabytes", "1", "--seconds", "0.01", "--report", reported]
    done = program(
        "benchmarks.contest.link_rates",
        *[*argv, "--cases", *CASES],
        processes=2,
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(reported.read_text())
    assert list(rates) == list(CASES)
    assert all(rate > 0 for by_size in rates.values() for rate in by_size.values())
    assert DEFAULT_CASES == ("all_gather", "reduce_scatter", "all_to_all", "all_gather_beside_all_to_all")


def test_settings_are_within_nccls_limits() -> None:
    for name, settings in link_settings.SETTINGS.items():
        threads, sockets = (int(settings.get(key, 1)) for key in grid.NCCL_SETTINGS["4sockets"])
        assert threads <= 16, name
        assert threads * sockets <= 64, name
        chunk = int(settings.get("NCCL_P2P_NET_CHUNKSIZE", 1 << 17))
        assert 8 * chunk <= int(settings.get("NCCL_BUFFSIZE", 1 << 22)), name  # NCCL would cut it
