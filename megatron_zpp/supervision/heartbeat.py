"""Ends a run if one of its ranks stops: every rank reports which rank stopped, and what it was doing.

Each rank sends heartbeat messages: a thread writes what the rank is doing under the rank's key of the shared
store. The thread of rank 0 reads all messages at once and writes a verdict, if there is one; other ranks read
the verdict and the message of rank 0, so one round of N ranks costs O(N). A second thread never touches the
store, which may be what stopped: it ends the process if there is a verdict, or if the store has not answered
for too long. All use a clock that pauses with the process, so a job suspended as a whole can continue.

A rank that was killed is known much sooner, by its lifeline (distributed/lifelines.py). Ranks whose lifeline
could not be made hear of it from the store.

A rank *asks* if a collective failed, or if it was told to stop and makes no progress: a launcher sends the
signal after another rank died, and kills the rank before --heartbeat-timeout is over. A silence of a few
intervals then suffices for a verdict, and messages are exchanged more often. A rank in a long step still
sends messages, so a request to stop never ends a run whose ranks are all alive.
"""

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_zpp.config.command_line import one_line
from megatron_zpp.distributed.job_store import ForeignValue
from megatron_zpp.distributed.rank_addresses import SAY_AFTER
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.errors import end_at_once
from megatron_zpp.supervision.heartbeat_messages import HeartbeatMessage, LivenessMonitor, Patience
from megatron_zpp.supervision.once_per_node import write_line

if TYPE_CHECKING:
    from megatron_zpp.distributed.lifelines import Lifelines

_VERDICT = "heartbeat/verdict"  # "verdict" is that of the rendezvous
_NOTHING_YET = "null"
_NEWS = 2.0  # seconds for lifelines to tell what ended a rank; no rank needs them but on a busy machine
_FAREWELL = 8.0  # seconds for other ranks to read a verdict before rank 0 closes the store


@contextmanager
def heartbeat(
    store: dist.Store,
    topology: Topology,
    timeout: float,
    prog: str,
    told_to_stop: Callable[[], bool] = lambda: False,
    lifelines: "Lifelines | None" = None,
) -> Iterator[Activity]:
    """Send heartbeats while the block runs; yields the `Activity` to report to. `timeout` 0 disables them.

    `told_to_stop` returns whether a launcher has asked this process to stop. `lifelines` tell of ranks that
    were killed; they are left at the end of the block, or at once if `timeout` is 0. All ranks enter and
    leave the block. A rank that leaves with an error tells the others first, unless it has told them by
    `Activity.tell_error`; if a collective failed, it first finds out which rank caused that. Rank 0, which
    may host the store, leaves last.
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
    """The two threads of one rank and their state."""

    def __init__(
        self,
        store: dist.Store,
        topology: Topology,
        timeout: float,
        prog: str,
        activity: Activity,
        told_to_stop: Callable[[], bool],
        lifelines: "Lifelines | None",
    ) -> None:
        self._told_to_stop, self._lifelines = told_to_stop, lifelines
        self._topology, self._timeout, self._prog, self._activity = topology, timeout, prog, activity
        self._clock = activity.clock
        self._interval = min(1.0, timeout / 6)
        self._news = _NEWS if lifelines else 0.0
        self._monitor = LivenessMonitor(timeout=timeout, patience=4 * self._interval, news=self._news)
        self._count = 0
        # The newest messages that this rank has read: rank 0's, because it cannot report its own end, and on
        # rank 0 those of all.
        self._read: list[HeartbeatMessage | None] = [None]
        self._asks, self._leaves = False, False
        self._hurries = False  # some rank asks
        self._failed: str | None = None
        self._found: str | None = None  # rank 0's verdict, kept while the others read it
        self._ending = threading.Lock()  # taken by the thread that ends this process
        self._verdict: str | None = None  # the verdict that ends this process
        self._answered = self._clock.seconds
        self._said = 0.0  # when slow ranks were last reported
        self._shared = store
        self._wake, self._told, self._over = threading.Event(), threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"heartbeat {work.__name__}", daemon=True)
            for work in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        if lifelines:
            lifelines.last_seen, lifelines.ended = self._last_seen, self._lose

    def ask(self) -> None:
        """After a failed collective: wait for the verdict, which ends the process."""
        self._begin_to_ask()
        self._over.wait(8 * self._interval + self._news)
        if self._found:  # and the others are being told
            self._over.wait(_FAREWELL + self._interval)

    def fail(self, message: str) -> None:
        """Tell the other ranks, if they can be reached soon, that this rank ends with an error; only once."""
        if self._failed is not None:
            return
        self._failed = message
        self._leave_lifelines()
        self._wake.set()
        self._told.wait(_FAREWELL + 2 * self._interval if self._topology.rank == 0 else 6 * self._interval)
        self._over.set()

    def leave(self) -> None:
        """Announce that this rank has finished, and stop watching; rank 0 waits until all others have."""
        self._leaves = True
        self._wake.set()
        self._told.wait()  # or a verdict ends the process
        self._leave_lifelines()
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(2 * self._interval)

    def _last_seen(self, rank: int) -> str:
        """What a rank was doing."""
        message = self._read[rank] if rank < len(self._read) else None
        return message.doing if message else "starting"

    def _lose(self, text: str) -> None:
        """A lifeline tells that a rank has ended; called by the thread of the lifelines."""
        if self._failed is not None or self._over.is_set():
            return
        if self._topology.rank == 0 and self._lifelines and not self._lifelines.complete:
            self._found = self._found or text  # for ranks that hear only what is in the store
            self._wake.set()
        else:
            self._end(text)

    def _end(self, verdict: str) -> None:
        """End this process."""
        self._ending.acquire()  # never released
        self._leave_lifelines()
        end_at_once(self._prog, self._topology, f"error: {verdict}", 1)

    def _leave_lifelines(self) -> None:
        if self._lifelines:
            self._lifelines.leave()

    def _begin_to_ask(self) -> None:
        self._asks = self._hurries = True
        self._wake.set()

    def _beat(self) -> None:
        """The first thread."""
        exchange = self._exchange_as_first if self._topology.rank == 0 else self._exchange
        try:
            self._connect()
            self._make_keys()
            while not self._over.is_set():
                # A time-out, or a stranger's value; if they persist, the second thread notices.
                with suppress(dist.DistStoreError, ForeignValue):
                    exchange()
                self._wake.wait(self._interval / 4 if self._hurries else self._interval)
                self._wake.clear()
        except dist.DistNetworkError:
            if not (self._leaves or self._failed):
                self._over.wait(self._news)  # of the rank that was lost first, which end this process
            if self._leaves or self._failed:
                self._told.set()
                return
            # After a verdict, other ranks may exit before this process does.
            self._verdict = self._verdict or self._without_store("is gone")

    def _watch(self) -> None:
        """The second thread."""
        # On a busy machine one call of the store may time out, but hardly two.
        patience = Patience(self._timeout, 5 * self._interval, self._news)
        while not self._over.wait(self._interval / 4):
            self._clock.tick(2 * self._interval)
            if not self._asks and self._told_to_stop() and self._makes_no_progress():
                self._begin_to_ask()
            silence = self._clock.seconds - self._answered
            longest = patience.limit(self._clock.seconds, asks=self._asks)
            if self._verdict is None and silence > longest:
                self._verdict = self._without_store(f"has been silent for {silence:.0f} s")
            if self._verdict is not None and self._failed is None:
                self._end(self._verdict)

    def _makes_no_progress(self) -> bool:
        """Whether this rank has made no new mark for some time: it may be waiting for another."""
        return self._clock.seconds - self._activity.latest.since > 2 * self._interval

    def _without_store(self, what: str) -> str:
        """The verdict on rank 0, whose process or launcher hosts the store."""
        name = self._read[0].name if self._read[0] else "rank 0"
        return f"{name}, where the run's store is kept, {what}; last seen: {self._last_seen(0)}"

    def _connect(self) -> None:
        """Open a connection of this thread's own, because a blocking call holds the connection that it uses.

        If the process that hosts the store is stopped, this waits for long, and the second thread notices.
        """
        self._store = self._shared.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._store.set_timeout(timedelta(seconds=2 * self._interval))

    def _make_keys(self) -> None:
        """Create the keys that this rank reads, because reading waits for missing keys."""
        ranks = range(self._topology.world_size) if self._topology.rank == 0 else (0,)
        for key in (_VERDICT, *map(_key, ranks)):
            with suppress(ForeignValue):  # `exchange` meets it again
                self._store.compare_set(key, "", _NOTHING_YET)

    def _exchange(self) -> None:
        """One round of a rank other than 0."""
        leaves, failed = self._leaves, self._failed
        self._tell(left=leaves)
        if leaves or failed:
            self._told.set()  # and read nothing: rank 0 may close the store once it has read this
            return
        said, first = self._store.multi_get([_VERDICT, _key(0)])
        self._answered = self._clock.seconds
        self._read = [HeartbeatMessage.decode(first) or self._read[0]]
        self._monitor.see(self._read, self._answered)
        verdict = json.loads(said or _NOTHING_YET) or self._monitor.lost(self._read, asked=self._asks)
        if verdict:
            self._tell(left=True)  # rank 0 waits for it before it closes the store
            self._verdict = verdict

    def _exchange_as_first(self) -> None:
        """One round of rank 0."""
        leaves, failed = self._leaves, self._failed
        self._tell(left=False)
        messages = self._read_all()
        self._hurries = self._hurries or any(message and message.asks for message in messages)
        self._found = self._found or self._monitor.lost(messages) or self._monitor.stuck(messages)
        self._report_slow_ranks(messages)
        if self._found:
            self._store.set(_VERDICT, json.dumps(self._found))
            limit = time.monotonic() + _FAREWELL
            while not self._monitor.gone(self._read_all()[1:], _FAREWELL / 2) and time.monotonic() < limit:
                time.sleep(self._interval / 4)
        if failed or (leaves and all(message and message.left for message in messages[1:])):
            self._told.set()
        elif self._found:
            self._verdict = self._found

    def _report_slow_ranks(self, messages: list[HeartbeatMessage | None]) -> None:
        slow = self._monitor.slow(messages, SAY_AFTER)
        if slow and time.monotonic() - self._said > SAY_AFTER:
            self._said = time.monotonic()
            write_line(f"{self._prog}: waiting for {slow}")

    def _tell(self, *, left: bool) -> None:
        """Write this rank's message."""
        self._count += 1
        mark = self._activity.latest
        message = HeartbeatMessage(
            rank=self._topology.rank,
            host=platform.node(),
            count=self._count,
            doing=mark.text,
            marks=mark.number,
            seconds=self._clock.seconds - mark.since,
            patient=mark.patient,
            limit=mark.limit,
            asks=self._asks,
            failed=self._failed,
            left=left,
        )
        self._store.set(_key(self._topology.rank), message.encode())

    def _read_all(self) -> list[HeartbeatMessage | None]:
        """The newest messages of all ranks; the monitor sees them too."""
        texts = self._store.multi_get([_key(rank) for rank in range(self._topology.world_size)])
        self._answered = self._clock.seconds
        self._read = [HeartbeatMessage.decode(text) for text in texts]
        self._monitor.see(self._read, self._answered)
        return self._read


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def is_of_a_collective(error: BaseException) -> bool:
    """Whether another rank may have caused the error; errors of gloo and NCCL have no class of their own."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "nccl", "onnection", "ocket")
    )
