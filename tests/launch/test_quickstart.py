"""launch/quickstart.sh: from nothing to text, and a second call that continues."""

import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT, environment


def quickstart(work: Path, *flags: str) -> str:
    done = subprocess.run(
        [ROOT / "launch" / "quickstart.sh", *flags],
        env=environment(QUICKSTART_DIR=str(work)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_two_calls_make_one_run(tmp_path: Path) -> None:
    short = ("--train-iters", "2", "--log-interval", "1", "--eval-iters", "1")
    first = quickstart(tmp_path, *short, "--exit-interval", "1")
    assert "starting from initial weights" in first
    second = quickstart(tmp_path, *short)
    assert second.count("already there") == 3
    assert "resuming at iteration 1, 8 samples" in second
    assert "test loss at iteration 2" in second
    assert "--- sample 2 ---" in second
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
