"""A short run of the fault harness; `python tests/faults/harness.py --help` tells of a long one."""

from tests.support import run


def test_disturbed_runs_end_as_undisturbed_ones() -> None:
    done = run(
        *("tests/faults/harness.py", "--seconds", "60", "--cut-seconds", "20", "--flips", "300"), timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
