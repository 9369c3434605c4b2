"""A short run of the fault harness; `python tests/faults/harness.py --help` tells of a long one."""

import pytest

from tests.support import run


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seconds", "cut", "flips"), [(0, 8, 100), pytest.param(60, 30, 1000, marks=pytest.mark.nightly)]
)
def test_disturbed_runs_end_as_undisturbed_ones(seconds: int, cut: int, flips: int) -> None:
    """One case of each fault, and more while there is time."""
    argv = ("tests/faults/harness.py", "--seconds", seconds, "--cut-seconds", cut, "--flips", flips)
    done = run(*map(str, argv), timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
