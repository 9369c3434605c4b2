"""A short run of the fault harness; `python tests/faults/harness.py --help` tells of a long one."""

import json
from pathlib import Path

import pytest

from tests.support import run


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seconds", "cut", "flips"), [(0, 3, 100), (60, 30, 1000)])
def test_disturbed_runs_end_as_undisturbed_ones(seconds: int, cut: int, flips: int) -> None:
    """One case of each fault, and more while there is time."""
    argv = ("tests/faults/harness.py", "--seconds", seconds, "--cut-seconds", cut, "--flips", flips)
    done = run(*map(str, argv), timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(300)
def test_operations_cut_at_some_of_their_calls(tmp_path: Path) -> None:
    """Of saves, loads, removals and caches; the campaign does it at each call."""
    argv = ("tests/faults/campaign.py", "operations", "--cases", 100_000, "--every", 199)
    done = run(*map(str, argv), "--directory", str(tmp_path), timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout)["cases"] > 20
