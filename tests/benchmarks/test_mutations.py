"""How many of the bugs that benchmarks/mutations plants the tests find, and what a stale record says."""

from pathlib import Path

import pytest
from coverage import CoverageData

from benchmarks.mutations.executed import Executed
from tests.support import run


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
def test_the_tests_find_the_mutants() -> None:
    """Of 100 at least 93; the outcomes are in benchmarks/results/mutations.json."""
    done = run("benchmarks/mutations/run.py", timeout=6 * 3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_record_of_an_older_tree_says_how_to_make_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "tests-0.xml").write_text("<testsuites/>")
    data = CoverageData(str(tmp_path / "tests-0"))
    data.add_lines({"/other/tree/megatron_zpp/zero/engine.py": [1], "/other/tree/megatron_zpp/gone.py": [1]})
    data.write()
    said = r"older tree, with megatron_zpp/gone\.py; remove .* --record$"
    with pytest.raises(SystemExit, match=said) as ended:
        Executed(tmp_path, processes=1).load()
    assert "\n" not in str(ended.value)
