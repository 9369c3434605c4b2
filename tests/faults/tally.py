"""What injected faults led to."""

from collections import Counter
from dataclasses import dataclass, field

GOOD = ("equal", "found", "old and new whole")  # outcomes


@dataclass
class Tally:
    """What became of the faults."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, fault: str, outcome: str, detail: str = "") -> None:
        """Takes note of a fault and of what became of it, with what a reader of a failure needs to know."""
        self.faults[fault] += 1
        self.outcomes[f"{fault}: {outcome}"] += 1
        if outcome not in GOOD:
            self.failures.append(f"{fault}: {outcome}: {detail}")
            print("FAILURE", self.failures[-1], flush=True)
