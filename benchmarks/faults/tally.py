"""What injected faults led to."""

from collections import Counter
from dataclasses import dataclass, field

GOOD = (  # outcomes
    *("equal", "one line, then equal", "found", "old and new whole", "same bytes", "as the file says"),
)


@dataclass
class Tally:
    """Counts the outcomes of faults."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, fault: str, outcome: str, detail: str = "") -> None:
        """Record a fault and its outcome, with what helps to understand a failure."""
        self.faults[fault] += 1
        self.outcomes[f"{fault}: {outcome}"] += 1
        if outcome not in GOOD:
            self.failures.append(f"{fault}: {outcome}: {detail}")
            print("FAILURE", self.failures[-1], flush=True)
