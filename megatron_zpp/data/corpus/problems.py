"""Counts what had to be left out of the input, and shows the first few."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

KEPT = 5  # a wrong --json-key makes every line a problem


@dataclass(frozen=True)
class Problem:
    """One line that gave no document."""

    line: int  # from 1
    kind: str  # the same for all of its kind, to count by
    detail: str


@dataclass
class Problems:
    """How many of each kind, and the first few in full."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[Problem] = field(default_factory=list)

    @classmethod
    def of(cls, found: Iterable[Problem]) -> "Problems":
        problems = cls()
        for problem in found:
            problems.counts[problem.kind] += 1
            if len(problems.first) < KEPT:
                problems.first.append(problem)
        return problems


class Report:
    """All that a run leaves out: shows the first few as they come, or stops at the first, and sums up."""

    def __init__(self, say: Callable[[str], None], *, strict: bool = False) -> None:
        self._say, self._strict = say, strict
        self._counts: Counter[str] = Counter()
        self._shown = 0

    def add(self, problems: Problems, where: Callable[[Problem], str]) -> None:
        """`where` names file and line of a problem. Raises ValueError for the first one of a strict run."""
        for problem in problems.first[: KEPT - self._shown]:
            line = f"{where(problem)}: {problem.kind}: {problem.detail}"
            if self._strict:
                raise ValueError(f"{line}; mend the line, or leave out --strict")
            self._say(f"left out: {line}")
            self._shown += 1
        self._counts += problems.counts

    def summary(self) -> str:
        """For example `3 × malformed line, 1 × missing key`, and `nothing` when all is well."""
        kinds = (f"{count:,} × {kind}" for kind, count in self._counts.most_common())
        return ", ".join(kinds) or "nothing"
