"""The report of a real run: its plan and its traffic, from the files that it left."""

from pathlib import Path

from megatron_zpp.commands.report import ReportConfig, make_report
from tests.support import program, trained
from tests.train.conftest import BYTES, TINY


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
