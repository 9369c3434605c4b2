"""A short run of the fault harness; `python tests/faults/harness.py --help` tells of a long one."""

import pytest

from tests.support import run


@pytest.mark.timeout(600)
def test_disturbed_runs_end_as_undisturbed_ones() -> None:
    """One case of each fault, and more while there is time."""
    argv = ("tests/faults/harness.py", "--seconds", "5", "--cut-seconds", "10", "--flips", "200")
    done = run(*argv, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
