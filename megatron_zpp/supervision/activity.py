"""What a rank is doing, in words and in order: what the others are told when it stops."""

from dataclasses import dataclass

from megatron_zpp.supervision.running_time import RunningTime


@dataclass(frozen=True)
class Mark:
    """`number` grows with every mark, `since` is on the clock of its `Activity`.

    It may take --heartbeat-timeout; or `limit` seconds, where others want to hear soon who is slow; or, if it
    is `patient`, as long as it likes: what is built, loaded or saved.
    """

    text: str
    number: int
    since: float
    patient: bool
    limit: float | None = None


class Activity:
    """The newest mark of this process. All ranks make the same marks in the same order, so that the rank
    that stopped, and not those that wait for it, is the one with the fewest."""

    def __init__(self) -> None:
        self.clock = RunningTime()
        self.latest = Mark("starting", 0, self.clock.seconds, patient=True)

    def now(self, text: str, *, patient: bool = False, limit: float | None = None) -> None:
        """Says what begins here. Costs a microsecond; safe to be read by another thread at any time."""
        self.latest = Mark(text, self.latest.number + 1, self.clock.seconds, patient, limit)
