"""What ranks tell each other about themselves, and what follows from it; no clock, no store, no thread."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class HeartbeatMessage:
    """One rank at one moment; `count` grows with every beat.

    `doing`, `marks`, `patient` and `limit` are its newest mark (activity.py), made `seconds` before. It
    `asks` when a collective failed and it does not know why, or when it was told to stop; `failed` is its own
    error; `left` is a good-bye.
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
        """The rank and its host."""
        return f"rank {self.rank} [{self.host}]"

    def encode(self) -> str:
        """As it is kept in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> "HeartbeatMessage | None":
        """The inverse; None for a rank that has not come yet."""
        values = json.loads(text)
        return None if values is None else cls(**values)


class LivenessMonitor:
    """Says which rank ended a run, from the beats that it has seen at some moments.

    A rank is silent while its beats stay the same: lost after `timeout` seconds, or after `patience` when
    another one asks.
    """

    def __init__(self, *, timeout: float, patience: float) -> None:
        self._timeout, self._patience = timeout, patience
        # Of each rank the count of its newest beat, and when that came.
        self._newest: dict[int, tuple[int, float]] = {}
        self._now = 0.0

    def see(self, beats: Sequence[HeartbeatMessage | None], now: float) -> None:
        """Takes note of the beats of ranks 0 to … at the time `now`, in seconds."""
        self._now = now
        for rank, beat in enumerate(beats):
            count = beat.count if beat else 0
            if rank not in self._newest or self._newest[rank][0] != count:
                self._newest[rank] = (count, now)

    def lost(self, beats: Sequence[HeartbeatMessage | None], *, asked: bool = False) -> str | None:
        """The rank that failed, or has been silent for longest and too long; None when all are there.

        `asked`: a rank asks whose beat may not be among `beats`.
        """
        for beat in beats:
            if beat and beat.failed:
                return f"{beat.name} failed: {beat.failed}"
        asked = asked or any(beat and beat.asks for beat in beats)
        limit = self._patience if asked else self._timeout
        silences = [0.0 if beat and beat.left else self._silence(rank) for rank, beat in enumerate(beats)]
        longest = max(silences)
        if longest <= limit:
            return None
        rank = silences.index(longest)
        beat = beats[rank]
        name, doing = (beat.name, beat.doing) if beat else (f"rank {rank}", "starting")
        return f"{name} has been silent for {longest:.0f} s; last seen: {doing}"

    def stuck(self, beats: Sequence[HeartbeatMessage | None]) -> str | None:
        """The rank with the fewest marks, for which the others may be waiting, if its newest is too old."""
        last = _last(beats)
        if not last or any(beat.patient or beat.seconds <= (beat.limit or self._timeout) for beat in last):
            return None
        flag = "--heartbeat-timeout" if last[0].limit is None else "--preflight-timeout"
        return (
            f"{_names(last)} stuck for {last[0].seconds:.0f} s; last seen: {last[0].doing} "
            f"(if it is only slow, raise {flag})"
        )

    def slow(self, beats: Sequence[HeartbeatMessage | None], seconds: float) -> str | None:
        """For whom the others have waited so many seconds, where the mark has a limit; None for nobody."""
        if None in beats:  # met the others and was not heard of again
            absent = beats.index(None)
            waited = self._silence(absent)
            return f"rank {absent}: starting for {waited:.0f} s" if waited > seconds else None
        last = _last(beats)
        last = [beat for beat in last if self._silence(beat.rank) > self._patience] or last
        if not last or last[0].limit is None:
            return None
        waited = min(beat.seconds + self._silence(beat.rank) for beat in last)
        return f"{_names(last)}: {last[0].doing} for {waited:.0f} s" if waited > seconds else None

    def gone(self, beats: Sequence[HeartbeatMessage | None], silence: float) -> bool:
        """Whether each of them has left or failed, or been silent for so many seconds."""
        return all(
            beat is None or beat.left or beat.failed or self._silence(beat.rank) > silence for beat in beats
        )

    def _silence(self, rank: int) -> float:
        """Seconds since a rank's newest beat came."""
        return self._now - self._newest[rank][1]


def _last(beats: Sequence[HeartbeatMessage | None]) -> list[HeartbeatMessage]:
    """Those of the ranks present that have the fewest marks."""
    present = [beat for beat in beats if beat and not beat.left]
    fewest = min((beat.marks for beat in present), default=0)
    return [beat for beat in present if beat.marks == fewest]


def _names(beats: Sequence[HeartbeatMessage]) -> str:
    return " and ".join(beat.name for beat in beats[:4]) + (" and others" if len(beats) > 4 else "")
