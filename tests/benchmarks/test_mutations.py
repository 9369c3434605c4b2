"""How many of the bugs that benchmarks/mutations plants the tests find."""

import pytest

from tests.support import run


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
def test_the_tests_find_the_mutants() -> None:
    """Of 100 at least 93; the outcomes are in benchmarks/results/mutations.json."""
    done = run("benchmarks/mutations/run.py", timeout=6 * 3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
