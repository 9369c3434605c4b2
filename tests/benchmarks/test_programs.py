"""Benchmarks print their help, and obey or refuse what else they are told."""

from pathlib import Path

import pytest

from tests.support import run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = [path for path in sorted(BENCHMARKS.rglob("*.py")) if "__main__" in path.read_text()]
PARSERS = ("ArgumentParser(", "program_parser(", "contestant_parser(")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_parse_their_command_line(program: Path) -> None:
    """Otherwise --help would run the benchmark, and write its result."""
    assert any(parser in program.read_text() for parser in PARSERS)


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_print_their_help(program: Path) -> None:
    helped = run(str(program), "--help")
    assert helped.returncode == 0, helped.stderr
    assert "usage: " in helped.stdout
