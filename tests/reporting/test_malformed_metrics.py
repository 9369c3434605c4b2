"""A metrics file that no run has written gives a page, or one line that names the line of the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.commands.report import ReportConfig, make_report
from megatron_zpp.reporting.report import page

STEP = {
    **{"consumed_samples": 8, "lm_loss": 5.0, "grad_norm": 1.0, "learning_rate": 1e-3, "loss_scale": 1.0},
    **{"global_batch_size": 8, "skipped": 0, "nan": 0, "elapsed_ms": 100.0, "tokens_per_second": 1e4},
    **{"mfu": None, "tflops_per_gpu": 1.0, "intra_node_bytes": 0, "inter_node_bytes": 10},
    **{"memory_allocated_bytes": 5, "memory_peak_bytes": 6},
}
EVALUATION = {"valid_loss": 4.0, "valid_perplexity": 50.0}
GONE = object()
NUMBERS = [float("nan"), float("inf"), -float("inf"), 10**400, 2**70, 1e308, -1, 0]
VALUES = [GONE, *NUMBERS, "x", None, True, [], {}]


def outcome(path: Path) -> str:
    """The page, or the error for the user."""
    try:
        return page.page(make_report(ReportConfig(metrics=str(path))))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["iteration", *STEP, *EVALUATION])
def test_a_report_of_malformed_metrics_has_no_traceback(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its charts, which take a tenth of a second each; test_html_report.py has numbers as odd."""
    monkeypatch.setattr(page, "chart", lambda curves, **_: "")
    for value in VALUES:
        for everywhere in (False, True):
            records: list[dict[str, Any]] = []
            for iteration in range(1, 7):
                records.append({"iteration": iteration} | STEP)
                if iteration % 3 == 0:
                    records.append({"iteration": iteration} | EVALUATION)
            for number, record in enumerate(records):
                if name in record and (everywhere or number in (3, 7)):
                    record[name] = value
                    if value is GONE:
                        del record[name]
            path = tmp_path / "metrics.jsonl"
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            said = outcome(path)
            assert said.startswith(("<!doctype html>", "ValueError: ")), (value, said[:200])
            assert said.startswith("<") or len(said.splitlines()) == 1
