"""Ends a run if one of its ranks stops: every rank reports which rank stopped, and what it was doing.

docs/internals/faults.md, "Liveness", says who sends messages to whom, and who decides. All use a clock that
pauses with the process, so a job suspended as a whole can continue. A rank *asks* if a collective failed, or
if it was told to stop and makes no progress. A silence of a few intervals then suffices for a verdict.
"""

import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf

import torch
import torch.distributed as dist

from megatron_zpp.config.command_line import one_line
from megatron_zpp.distributed.lifelines import Lifelines
from megatron_zpp.distributed.rank_addresses import SAY_AFTER
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.errors import end_at_once
from megatron_zpp.supervision.heartbeat_messages import HeartbeatMessage, LivenessMonitor
from megatron_zpp.supervision.once_per_node import write_line

_SAME = 2.0  # seconds for this rank to find the error of another one itself: then one line says it
_NEWS = 2.0  # seconds for a closed lifeline to tell of an end; no rank needs them but on a busy machine


@contextmanager
def heartbeat(
    store: dist.Store,
    topology: Topology,
    timeout: float,
    prog: str,
    told_to_stop: Callable[[], bool] = lambda: False,
    lifelines: Lifelines | None = None,
) -> Iterator[Activity]:
    """Send heartbeats while the block runs; yields the `Activity` to report to. `timeout` 0 disables them.

    `told_to_stop` returns whether a launcher has asked this process to stop. `lifelines` are left at the end
    of the block, or at once if `timeout` is 0; a single rank has none. All ranks enter and leave the block. A
    rank that leaves with an error tells the others first, unless it has told them by `Activity.tell_error`;
    if a collective failed, it first finds out which rank caused that. Rank 0, which may host `store`, leaves
    last.
    """
    activity = Activity()
    if timeout == 0:
        if lifelines:
            lifelines.leave()
        yield activity
        return
    pulse = _Pulse(store, topology, timeout, prog, activity, told_to_stop, lifelines)
    activity.tell_error = lambda error: pulse.fail(one_line(error))
    try:
        yield activity
    except BaseException as error:
        if topology.world_size > 1 and is_of_a_collective(error):
            pulse.ask()
        pulse.fail(one_line(error))
        raise
    pulse.leave()


class _Pulse:
    """The thread of one rank that sends and judges heartbeat messages, and its state."""

    def __init__(
        self,
        store: dist.Store,
        topology: Topology,
        timeout: float,
        prog: str,
        activity: Activity,
        told_to_stop: Callable[[], bool],
        lifelines: Lifelines | None,
    ) -> None:
        self._told_to_stop, self._lifelines = told_to_stop, lifelines
        self._topology, self._prog, self._activity = topology, prog, activity
        self._interval = min(1.0, timeout / 6)
        self._news = _NEWS if lifelines else 0.0
        self._monitor = LivenessMonitor(timeout=timeout, patience=4 * self._interval, news=self._news)
        self._asks, self._failed = False, False
        self._count, self._sent = 0, 0.0
        self._own = self._message()  # the newest
        self._said = 0.0  # when slow ranks were last reported
        self._ending = threading.Lock()  # taken by the thread that ends this process
        self._over = threading.Event()
        if lifelines:
            lifelines.ended = self._lose
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        if lifelines and topology.rank == 0:
            watch = threading.Thread(target=self._watch, args=(store, lifelines), name="store", daemon=True)
            watch.start()

    def ask(self) -> None:
        """After a failed collective: wait for the verdict, which ends the process."""
        self._asks = True
        self._over.wait(8 * self._interval + self._news)

    def fail(self, message: str) -> None:
        """Tell the other ranks that this rank ends with an error; only once."""
        if self._failed:
            return
        self._failed = True
        self._send_last(self._message(failed=message))

    def leave(self) -> None:
        """Announce that this rank has finished, and stop watching; rank 0 waits until all others have."""
        self._await_others(inf, "left")  # or a verdict ends the process
        self._send_last(self._message(left=True))

    def _await_others(self, seconds: float, *words: str) -> None:
        """On rank 0, which may host the store: wait until the others have said one of `words`."""
        if self._lifelines is None or self._topology.rank > 0:
            return
        beats, deadline = self._lifelines.beats, time.monotonic() + seconds
        ranks = range(1, self._topology.world_size)
        while time.monotonic() < deadline and not all(
            any(beats.get(rank, {}).get(word) for word in words) for rank in ranks
        ):
            time.sleep(0.01)

    def _send_last(self, message: HeartbeatMessage) -> None:
        """End the thread, whose messages must not follow this one, send it and leave."""
        self._over.set()
        self._thread.join()
        if self._lifelines:
            self._lifelines.beat(asdict(message))
            if message.failed:
                self._await_others(_SAME, "left", "failed")
            self._lifelines.leave()

    def _lose(self, text: str) -> None:
        """A lifeline tells that a rank ends the run; called by the thread of the lifelines."""
        if not (self._failed or self._over.is_set()):
            self._end(text)

    def _end(self, verdict: str) -> None:
        self._ending.acquire()  # never released
        if self._lifelines:
            self._lifelines.leave()
        end_at_once(self._prog, self._topology, verdict)

    def _beat(self) -> None:
        while not self._over.wait(self._interval / 4):
            self._activity.tick(2 * self._interval)
            waited = self._activity.seconds - self._activity.latest.since  # maybe for another rank
            if self._told_to_stop() and waited > 2 * self._interval:
                self._asks = True
            if self._asks or self._activity.seconds - self._sent >= self._interval:
                self._sent, self._own = self._activity.seconds, self._message()
                if self._lifelines:
                    self._lifelines.beat(asdict(self._own))
            if verdict := self._verdict():
                failed = any(message and message.failed for message in self._newest())
                if self._over.wait(_SAME if failed else 0.0):
                    break
                if self._lifelines and self._topology.rank == 0:
                    self._lifelines.tell(verdict)  # which ends this process
                else:
                    self._end(verdict)

    def _watch(self, store: dist.Store, lifelines: Lifelines) -> None:
        """End the run if the launcher that keeps its store is gone: its ranks would train on unattended.

        A thread of rank 0, because a store that is stopped answers late.
        """
        try:
            own = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
            while not self._over.wait(self._interval):
                own.check(["heartbeat"])
        except dist.DistError:
            if not self._over.is_set():
                lifelines.tell("the run's store is gone: the launcher that keeps it has ended")

    def _verdict(self) -> str | None:
        """Why the run has to end, by the newest messages; None if it has not."""
        messages = self._newest()
        self._monitor.see(messages, self._activity.seconds)
        lost = self._monitor.lost(messages, asked=self._asks)
        if lost or self._topology.rank > 0:
            return lost
        slow = self._monitor.slow(messages, SAY_AFTER)
        if slow and time.monotonic() - self._said > SAY_AFTER:
            self._said = time.monotonic()
            write_line(f"{self._prog}: waiting for {slow}")
        return self._monitor.stuck(messages)

    def _newest(self) -> list[HeartbeatMessage | None]:
        """The newest messages that this rank judges: on rank 0 those of all, elsewhere that of rank 0."""
        beats = self._lifelines.beats if self._lifelines else {}
        if self._topology.rank > 0:
            return [HeartbeatMessage(**beats[0]) if 0 in beats else None]
        ranks = range(1, self._topology.world_size)
        return [self._own, *(HeartbeatMessage(**beats[rank]) if rank in beats else None for rank in ranks)]

    def _message(self, *, failed: str | None = None, left: bool = False) -> HeartbeatMessage:
        self._count += 1
        mark = self._activity.latest
        return HeartbeatMessage(
            rank=self._topology.rank,
            host=platform.node(),
            count=self._count,
            doing=mark.text,
            marks=mark.number,
            seconds=self._activity.seconds - mark.since,
            patient=mark.patient,
            limit=mark.limit,
            asks=self._asks,
            failed=failed,
            left=left,
        )


def is_of_a_collective(error: BaseException) -> bool:
    """Whether another rank may have caused the error; errors of gloo and NCCL have no class of their own."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "nccl", "onnection", "ocket")
    )
