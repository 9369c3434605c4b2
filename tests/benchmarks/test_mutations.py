"""The bugs that benchmarks/mutations plants, and how many of them the tests find."""

import ast

import pytest

from benchmarks.mutations.operators import imported_lines, mutations
from benchmarks.mutations.run import sample, wilson
from tests.support import run

TOY = '''"""A module."""

LIMIT = 3


@declared(frozen=True)
def toy(rows: list[int] = [1], *, known: int = 0) -> int:
    """1 + 1."""
    ä = [row for row in rows if row < LIMIT and not known]
    for row in rows[known:]:
        if row == known:
            continue
        say(f"{row + 1}", "1 + 1", rows + 1)
        ä.append(row)
        ä[0] += sum(ä, start=row)
    if not ä:
        raise ValueError(rows + 1)
    return "ä" if ä[0] else known * 2
'''
CHANGED = {
    3: ["LIMIT = (2)", "LIMIT = (4)"],
    7: [
        "def toy(rows: list[int] = [(0)], *, known: int = 0) -> int:",
        "def toy(rows: list[int] = [(2)], *, known: int = 0) -> int:",
        "def toy(rows: list[int] = [1], *, known: int = (-1)) -> int:",
        "def toy(rows: list[int] = [1], *, known: int = (1)) -> int:",
    ],
    9: [
        "ä = [row for row in rows if (row < LIMIT or not known)]",
        "ä = [row for row in rows if (row <= LIMIT) and not known]",
        "ä = [row for row in rows if row < LIMIT and (known)]",
    ],
    10: ["for row in rows[(known + 1):]:"],
    11: ["if (not (row == known)):", "if (row != known):"],
    12: ["break"],
    14: ["pass"],
    15: [
        "pass",
        "ä[(-1)] += sum(ä, start=row)",
        "ä[(1)] += sum(ä, start=row)",
        "ä[0] += sum(ä, )",
        "ä[0] -= sum(ä, start=row)",
    ],
    16: ["if (not (not ä)):", "if (ä):"],
    18: [
        'return "ä" if (not (ä[0])) else known * 2',
        'return "ä" if ä[(-1)] else known * 2',
        'return "ä" if ä[(1)] else known * 2',
        'return "ä" if ä[0] else (known // 2)',
        'return "ä" if ä[0] else known * (1)',
        'return "ä" if ä[0] else known * (3)',
    ],
}


def test_each_operator_changes_its_place_and_nothing_else() -> None:
    """Not the decorator, hints, texts, what is only told, nor an error."""
    found: dict[int, list[str]] = {}
    for mutation in mutations(TOY):
        at, lines = mutation.line - 1, mutation.apply(TOY).splitlines()
        assert [*lines[:at], *lines[at + 1 :]] == [*TOY.splitlines()[:at], *TOY.splitlines()[at + 1 :]]
        ast.parse(mutation.apply(TOY))
        found.setdefault(mutation.line, []).append(lines[at].strip())
    assert {line: sorted(texts) for line, texts in found.items()} == CHANGED


def test_functions_begin_where_their_bodies_do() -> None:
    assert imported_lines(TOY) == {1, 2, 3, 4, 5, 6, 7, 19}


def test_samples_are_valid_and_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    file = "megatron_zpp/placement.py"
    lines = [(file, line) for line in range(200)]
    mutants = sample(lines)
    assert "seed 48: 100 of" in capsys.readouterr().out
    assert mutants == sample(reversed(lines))
    assert sample(lines, seed=49, size=10) == sample(lines, seed=49)[:10] != mutants[:10]
    assert len({mutant.mutation.line for mutant in mutants}) == len(mutants) > 20
    with open(file) as source:
        text = source.read()
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.mutation.apply(text))) != ast.dump(ast.parse(text))


def test_the_interval_is_wilsons() -> None:
    """Both ends are the shares p of whose samples this one is 1.96 standard errors away."""
    for end in wilson(93, 100):
        assert abs(0.93 - end) == pytest.approx(1.96 * (end * (1 - end) / 100) ** 0.5, rel=0.02)


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
def test_the_tests_find_the_mutants() -> None:
    """Of 100 at least 93; the outcomes are in benchmarks/results/mutations.json."""
    done = run("benchmarks/mutations/run.py", timeout=6 * 3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
