"""The report of a real run: its plan and its traffic, from the files that it left."""

from pathlib import Path

import pytest

from megatron_zpp.commands.report import ReportConfig, make_report
from tests.support import program, trained


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of two data ranks, of two tensor ranks each, leaves."""
    from tests.train.conftest import BYTES, TINY

    directory = tmp_path_factory.mktemp("left")
    flags = [
        *"--mock-data --train-iters 4 --eval-iters 1 --zero-stage 3 --timing-log-level 1 "
        "--tensor-model-parallel-size 2".split(),
        *BYTES,
        *TINY,
    ]
    trained(
        *(*flags, "--save", str(directory / "save"), "--metrics-file", str(directory / "metrics.jsonl")),
        processes=4,
    )
    return directory


def test_a_report_compares_the_run_with_its_plan(left: Path) -> None:
    report = make_report(ReportConfig(metrics=str(left / "metrics.jsonl"), checkpoint=str(left / "save")))
    assert report.iterations == 4
    assert [row.note for row in report.traffic] == ["equal", "equal"]
    assert int(report.traffic[1].measured.replace(",", "")) > 0
    assert report.memory[-1].what == "peak"
    assert ("--zero-stage", "3", True) in [(each.flag, each.value, each.changed) for each in report.settings]
    page = left / "new" / "report.html"
    done = program(
        *("megatron_zpp.commands.report", str(left / "metrics.jsonl"), "--checkpoint", str(left / "save")),
        *("--x", "tokens", "--output", str(page)),
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    for said in ("--zero-stage 3", "forward backward", "inside nodes", "on a CPU the whole process"):
        assert said in text
