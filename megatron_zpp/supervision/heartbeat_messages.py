"""Heartbeat messages, and the rules that decide which rank failed; no clock, store or thread."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


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
        """The rank and its host."""
        return f"rank {self.rank} [{self.host}]"

    def encode(self) -> str:
        """The text that the store keeps."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> "HeartbeatMessage | None":
        """The inverse of `encode`; None for a rank that has not connected yet."""
        values = json.loads(text)
        return None if values is None else cls(**values)


class LivenessMonitor:
    """Decides which rank ended a run, from the heartbeat messages seen so far.

    A rank is silent while its message stays the same. A silent rank is lost after `timeout` seconds, or after
    `patience` seconds if another rank asks.
    """

    def __init__(self, *, timeout: float, patience: float) -> None:
        self._timeout, self._patience = timeout, patience
        # For each rank, the count of its newest message and the time when it arrived.
        self._newest: dict[int, tuple[int, float]] = {}
        self._now = 0.0

    def see(self, beats: Sequence[HeartbeatMessage | None], now: float) -> None:
        """Record the messages of ranks 0, 1, … at the time `now`, in seconds."""
        self._now = now
        for rank, beat in enumerate(beats):
            count = beat.count if beat else 0
            if rank not in self._newest or self._newest[rank][0] != count:
                self._newest[rank] = (count, now)

    def lost(self, beats: Sequence[HeartbeatMessage | None], *, asked: bool = False) -> str | None:
        """Describe the rank that failed, or the longest silent rank if that is too long; else None.

        `asked`: some rank asks, whose message may not be among `beats`.
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
        """Describe the ranks with the fewest marks, which others may wait for, if the mark is too old."""
        last = _last(beats)
        if not last or any(beat.patient or beat.seconds <= (beat.limit or self._timeout) for beat in last):
            return None
        flag = "--heartbeat-timeout" if last[0].limit is None else "--preflight-timeout"
        return (
            f"{_names(last)} stuck for {last[0].seconds:.0f} s; last seen: {last[0].doing} "
            f"(if it is only slow, raise {flag})"
        )

    def slow(self, beats: Sequence[HeartbeatMessage | None], seconds: float) -> str | None:
        """Describe the ranks that others have awaited for `seconds`, if their mark has a limit; else None."""
        if None in beats:  # connected and sent no message
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
        """Whether each rank has left, failed, or been silent for more than `silence` seconds."""
        return all(
            beat is None or beat.left or beat.failed or self._silence(beat.rank) > silence for beat in beats
        )

    def _silence(self, rank: int) -> float:
        """Seconds since a rank's newest message arrived."""
        return self._now - self._newest[rank][1]


def _last(beats: Sequence[HeartbeatMessage | None]) -> list[HeartbeatMessage]:
    """The messages of the ranks that have the fewest marks and have not left."""
    present = [beat for beat in beats if beat and not beat.left]
    fewest = min((beat.marks for beat in present), default=0)
    return [beat for beat in present if beat.marks == fewest]


def _names(beats: Sequence[HeartbeatMessage]) -> str:
    return " and ".join(beat.name for beat in beats[:4]) + (" and others" if len(beats) > 4 else "")
