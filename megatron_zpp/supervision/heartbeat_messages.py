"""Heartbeat messages, and the rules that decide which rank failed; no clock, store or thread."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HeartbeatMessage:
    """The state of one rank at one moment; `count` grows with every message.

    `doing`, `marks`, `patient` and `limit` are its newest mark (activity.py), made `seconds` before. The
    rank `asks` if a collective failed for an unknown reason or if it was told to stop; `failed` is its own
    error; `left` means that it has finished.
    """

    rank: int
    host: str
    count: int
    doing: str
    marks: int
    seconds: float
    patient: bool
    limit: float | None = None
    asks: bool = False
    failed: str | None = None
    left: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} [{self.host}]"


class LivenessMonitor:
    """Decides which rank ended a run, from the heartbeat messages seen so far.

    A rank is silent while its message stays the same. A silent rank is lost after `timeout` seconds, or after
    `patience` seconds once another rank has asked for `news` seconds. What made that rank ask has just
    happened, and may be the end of a process whose silence began long before, such as one that was killed
    while it waited for a disk. Lifelines then tell of it.
    """

    def __init__(self, *, timeout: float, patience: float, news: float) -> None:
        self._timeout, self._patience, self._news = timeout, patience, news
        self._asked: float | None = None  # when some rank began to ask
        # For each rank, the count of its newest message and the time when it arrived.
        self._newest: dict[int, tuple[int, float]] = {}
        self._now = 0.0

    def see(self, messages: Sequence[HeartbeatMessage | None], now: float) -> None:
        """Record the messages of ranks 0, 1, … at the time `now`, in seconds."""
        self._now = now
        for rank, message in enumerate(messages):
            count = message.count if message else 0
            if rank not in self._newest or self._newest[rank][0] < count:
                self._newest[rank] = (count, now)

    def lost(self, messages: Sequence[HeartbeatMessage | None], *, asked: bool = False) -> str | None:
        """Describe the rank that failed, or the longest silent rank if that is too long; else None.

        `asked`: some rank asks, whose message may not be among `messages`.
        """
        for message in messages:
            if message and message.failed:
                return f"{message.name} failed: {message.failed}"
        if not (asked or any(message and message.asks for message in messages)):
            self._asked = None
        elif self._asked is None:
            self._asked = self._now
        at_once = self._asked is not None and self._now - self._asked >= self._news
        silences = [
            0.0 if message and message.left else self._silence(rank) for rank, message in enumerate(messages)
        ]
        longest = max(silences)
        if longest <= (self._patience if at_once else self._timeout):
            return None
        rank = silences.index(longest)
        message = messages[rank]
        name, doing = (message.name, message.doing) if message else (f"rank {rank}", "starting")
        return f"{name} has been silent for {longest:.0f} s; last seen: {doing}"

    def stuck(self, messages: Sequence[HeartbeatMessage | None]) -> str | None:
        """Describe the ranks with the fewest marks, which others may wait for, if the mark is too old."""
        last = _last(messages)
        if not last or any(
            message.patient or message.seconds <= (message.limit or self._timeout) for message in last
        ):
            return None
        flag = "--heartbeat-timeout" if last[0].limit is None else "--distributed-timeout-minutes"
        return (
            f"{_names(last)} stuck for {last[0].seconds:.0f} s; last seen: {last[0].doing} "
            f"(if it is only slow, raise {flag})"
        )

    def slow(self, messages: Sequence[HeartbeatMessage | None], seconds: float) -> str | None:
        """Describe the ranks that others have awaited for `seconds`, if their mark has a limit; else None."""
        if None in messages:  # connected and sent no message
            absent = messages.index(None)
            waited = self._silence(absent)
            return f"rank {absent}: starting for {waited:.0f} s" if waited > seconds else None
        last = _last(messages)
        last = [message for message in last if self._silence(message.rank) > self._patience] or last
        if not last or last[0].limit is None:
            return None
        waited = min(message.seconds + self._silence(message.rank) for message in last)
        return f"{_names(last)}: {last[0].doing} for {waited:.0f} s" if waited > seconds else None

    def _silence(self, rank: int) -> float:
        """Seconds since a rank's newest message arrived."""
        return self._now - self._newest[rank][1]


def _last(messages: Sequence[HeartbeatMessage | None]) -> list[HeartbeatMessage]:
    """The messages of the ranks that have the fewest marks and have not left."""
    present = [message for message in messages if message and not message.left]
    fewest = min((message.marks for message in present), default=0)
    return [message for message in present if message.marks == fewest]


def _names(messages: Sequence[HeartbeatMessage]) -> str:
    return " and ".join(message.name for message in messages[:4]) + (
        " and others" if len(messages) > 4 else ""
    )
