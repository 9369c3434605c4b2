"""Curves of metrics files; what is none is refused in a line, and at once."""

import json
from pathlib import Path

import pytest

from megatron_zpp.commands.plot import PlotConfig, _names, draw, load
from megatron_zpp.commands.report import ReportConfig, make_report
from megatron_zpp.reporting.report.curves import LINE_LIMIT, read_metrics
from megatron_zpp.reporting.sinks import metrics_file
from tests.reporting.test_curves import step
from tests.support import program


def iterations(path: Path) -> tuple[list[int], list[str]]:
    """The iterations of a file's records, and the warnings."""
    warnings: list[str] = []
    records = read_metrics(str(path), warnings.append)
    return [record["iteration"] for record in records], warnings


def test_a_line_that_was_cut_is_skipped_with_a_warning(tmp_path: Path) -> None:
    """The disk was full, or the host lost power; the next start began a new line, or an older one did not."""
    file = tmp_path / "run.jsonl"
    file.write_bytes(
        b'{"iteration": 1, "lm_loss": 2.5}\n{"iteration": 2, "lm_l\n{"iteration": 2, "lm_loss": 2.0}\n'
        b'{"iteration": 3, "lm{"iteration": 3, "lm_loss": 1.5}\n{"iteration": 4}\n' + bytes(9) + b"\n"
    )
    assert iterations(file) == ([1, 2, 4], [f"{file}: skipped 3 lines that are not JSON: 2, 4, 6"])
    done = program(
        *("megatron_zpp.commands.plot", str(file), "--output", str(tmp_path / "loss.png")),
    )
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "plot.py: warning: " in done.stderr
    assert "skipped 3 lines" in done.stderr


def test_the_incomplete_last_line_of_a_live_run_is_skipped_silently(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text('{"iteration": 1, "lm_loss": 2.5}\n{"iteration": 2, "lm_l')
    assert iterations(file) == ([1], [])
    file.write_text('{"iteration": 1, "lm_loss": 2.5}\n{"iteration": 2}')
    assert iterations(file) == ([1, 2], [])


@pytest.mark.parametrize(
    "text", ["text\n", "text", "{\n}\n", '{"iteration": 1}\n{"step": 2}\n', "[" * 100_000]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other.jsonl:[12]: not a line of a metrics file"):
        iterations(file)


def test_a_resumed_run_begins_a_new_line_behind_one_that_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    whole = '{"iteration": 1, "lm_loss": 2.5}\n'
    for before, after in ((whole, ""), (whole + '{"iteration": 2, "lm_l', "\n"), ("", ""), ("{", "\n")):
        file.write_text(before)
        with metrics_file(str(file), print) as write:
            write({"iteration": 2, "lm_loss": 2.0})
        assert file.read_text() == before + after + '{"iteration": 2, "lm_loss": 2.0}\n'


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1000 * LINE_LIMIT)  # zeros, of which the first line's limit is read
    with pytest.raises(ValueError, match="long:1: not a line of a metrics file"):
        iterations(tmp_path / "long")


def write_run(path: Path, scale: float, **more: float) -> str:
    records = [{**step(iteration, scale * (3 - iteration / 10)), **more} for iteration in range(1, 11)]
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, {"iteration": 10, "valid_loss": 2.0}])
    )
    return str(path)


def test_any_metric_by_any_axis_with_a_band_over_seeds(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{seed}.jsonl", 1 + seed / 10, grad_norm=1.0 + seed) for seed in range(3)]
    output = tmp_path / "new" / "plot.svg"
    done = program(
        "megatron_zpp.commands.plot",
        *(*runs, "--labels", "a", "a", "b${$", "--metric", "lm_loss", "grad_norm", "--x", "tokens"),
        *("--log-x", "--log-y", "--smoothing", "0.5", "--title", "seeds", "--output", str(output)),
    )
    assert done.returncode == 0, done.stderr
    content = output.read_bytes()
    for text in (b"a: training, mean of 2", b"b${$: training", b"gradient norm", b"tokens", b"seeds"):
        assert b"<!-- %s -->" % text in content, text  # matplotlib's comments beside its outlines of letters


def test_a_run_of_one_logged_step_is_a_dot(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps(step(1)))
    config = PlotConfig(runs=(str(tmp_path / "run.jsonl"),), output=str(tmp_path / "plot.svg"))
    draw(load(config.runs, ["run"]), config)
    assert "fill: #1f77b4" in (tmp_path / "plot.svg").read_text()  # C0; a line has no filling


def test_files_have_names_of_their_own(tmp_path: Path) -> None:
    """Runs of one name would be drawn as their mean."""
    assert make_report(ReportConfig(metrics=write_run(tmp_path / "lr0.1", 1.0))).title == "lr0.1"
    paths = ["a/lr0.1", "a/lr0.3", "b/run.jsonl", "c/run.jsonl"]
    assert _names(paths) == ["lr0.1", "lr0.3", "b/run", "c/run"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--metric wrong", "--metric wrong: no run has it; there are consumed_samples, lm_loss, "),
        ("other.jsonl --labels a a", "--labels a: its runs have lm_loss at no iteration in common"),
    ],
)
def test_metrics_that_cannot_be_drawn(tmp_path: Path, argv: str, said: str) -> None:
    first = write_run(tmp_path / "run.jsonl", 1.0)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"iteration": 99, "lm_loss": 1.0}) + "\n")
    done = program("megatron_zpp.commands.plot", first, *argv.replace("other.jsonl", str(other)).split())
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert said in done.stderr
