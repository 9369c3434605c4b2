"""Benchmarks print their help; without a parser --help would run them, and write their results."""

from pathlib import Path

import pytest

from tests.support import run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = [path for path in sorted(BENCHMARKS.rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_print_their_help(program: Path) -> None:
    helped = run(str(program), "--help")
    assert helped.returncode == 0, helped.stderr
    assert "usage: " in helped.stdout
