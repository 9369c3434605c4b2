"""Counts the skipped lines of the input, and shows the first few."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEPT = 5  # with a wrong --json-key every line is a problem


@dataclass(frozen=True)
class Problem:
    """One line without a document."""

    line: int  # from 1
    kind: str  # problems are counted by kind
    detail: str


class Report:
    """All problems of a run: shows the first few at once, or stops at the first, and sums them up."""

    def __init__(self, say: Callable[[str], None], *, strict: bool = False) -> None:
        self._say, self._strict = say, strict
        self._counts: Counter[str] = Counter()
        self._shown = 0

    def add(self, problems: Sequence[Problem], path: str, before: int = 0) -> None:
        """Add problems of a file, with `before` lines before those that the problems count.

        A strict report raises ValueError for the first problem.
        """
        for problem in problems[: KEPT - self._shown]:
            line = f"{path} line {before + problem.line}: {problem.kind}: {problem.detail}"
            if self._strict:
                raise ValueError(f"{line}; correct the line, or omit --strict")
            self._say(f"skipped: {line}")
            self._shown += 1
        self._counts.update(problem.kind for problem in problems)

    def summary(self) -> str:
        """Return, for example, `3 × malformed line, 1 × missing key`; `nothing` without problems."""
        kinds = (f"{count:,} × {kind}" for kind, count in self._counts.most_common())
        return ", ".join(kinds) or "nothing"
