"""A short run of each fault campaign; `python benchmarks/faults/campaign.py --help` tells of long ones."""

import json
from pathlib import Path

import pytest

from tests.support import run


def campaign(kind: str, cases: int, every: int, directory: Path) -> int:
    """Run every so-manieth case, none of which may fail; returns how many there were."""
    argv = ("benchmarks/faults/campaign.py", kind, "--cases", cases, "--every", every)
    done = run(*map(str, argv), "--directory", str(directory), timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)["cases"]


@pytest.mark.timeout(300)
def test_operations_cut_at_some_of_their_calls(tmp_path: Path) -> None:
    """Of saves, loads, removals and caches; the campaign does it at each call."""
    assert campaign("operations", 100_000, 997, tmp_path) > 8


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "cases", "every"), [("crashes", 22, 1), ("ranks", 15, 2), ("processes", 15, 1)]
)
def test_disturbed_runs_end_as_undisturbed_ones(kind: str, cases: int, every: int, tmp_path: Path) -> None:
    assert campaign(kind, cases, every, tmp_path) >= min(cases // every, 15)
