"""The connection of one rank of an island to the hub: sends its frames to outer steps, and fetches others'.

One thread does all traffic, in the order of calls. After a loss it connects again, and repeats what it did.
"""

import hashlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Any, NamedTuple, TypeVar

from megatron_zpp.config.values.addresses import host_and_port
from megatron_zpp.islands.messages import (
    LOST_AFTER,
    MOST_FRAME,
    MOST_TEXT,
    HubRefused,
    Message,
    Traffic,
    Wire,
)

_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds between attempts to connect; the last one again and again
_CONNECT = 5.0  # seconds for one attempt
_IDLE = 1.0  # seconds after which an idle thread looks whether the hub is still there
_GOODBYE = 5.0  # seconds, at most, for the hub to hear that the island has ended
_Result = TypeVar("_Result")


class _HubFailed(OSError):
    """The hub could not do what a rank asked, and says why."""


class Frame(NamedTuple):
    """Bytes that a rank sent to an outer step: the frame `index` of its layout."""

    layout: str
    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    data: Any  # what `room` made for it


@dataclass(frozen=True)
class Outcome:
    """A closed outer step: its members, in the order of the hub's --names, and the chosen frames of each.

    `frames` has the own island only if `past` was called, or if an earlier start of the island contributed:
    then those frames count, and not what this start has sent.
    """

    step: int
    members: tuple[str, ...]
    frames: Mapping[str, Sequence[Frame]]
    consumed: Mapping[str, int]  # samples that each member had read
    weights: Mapping[str, int]  # the checksum of its outer weights before the step
    late: float = 0.0  # seconds behind the first member, if this island came too late to be one


# The layouts of an island's ranks -> which of the frames of each are wanted
Choose = Callable[[Sequence[str]], Sequence[Sequence[int]]]
_Task = tuple[Callable[[Wire], Any], Future[Any]]
_Got = dict[tuple[str, int], list[Any]]  # frames by island and rank


class Link:
    """A rank's connection to the hub, which is made in the background, again after each loss.

    `start` is one text per start of the island, the same on all its ranks, such as a random number of rank 0.
    `layout` describes the frames of this rank. `settings` are values by flag that all islands must share;
    `length`, --train-iters, may differ. `say` gets a line where it does, when the hub cannot be reached, and
    when it is again. `room` makes memory for a frame of so many bytes, on the link's thread.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        island: str,
        rank: int,
        ranks: int,
        start: str,
        layout: str,
        settings: Mapping[str, Any],
        length: int = 0,
        say: Callable[[str], None],
        room: Callable[[int], Any] = bytearray,
    ) -> None:
        if len(layout.encode()) > MOST_TEXT:
            raise ValueError(f"a layout of {len(layout.encode()):,} bytes: must be at most {MOST_TEXT:,}")
        self._address, self._secret, self._say, self._room = address, secret, say, room
        self._island, self._start, self._layout = island, start, layout.encode()
        digest = hashlib.sha256(self._layout).hexdigest()
        self._hello = {"island": island, "rank": rank, "ranks": ranks, "start": start, "layout": digest}
        self._hello |= {"length": length, "settings": dict(settings)}
        self._place = host_and_port("--islands-at", address)
        self._layouts = {digest: layout}
        self.traffic = Traffic()
        self._tasks: queue.Queue[_Task] = queue.Queue()
        self._wire: Wire | None = None
        self._refusal = ""  # of all requests
        self._closed = threading.Event()
        self._losses, self._told = 0, ""
        self._thread = threading.Thread(target=self._run, name="islands", daemon=True)
        _close_in_forks(self)
        self._thread.start()

    def exchange(
        self,
        step: int,
        frames: Sequence[Any],
        choose: Choose,
        consumed: int,
        ready: Callable[[], int] = lambda: 0,
    ) -> Future[Outcome]:
        """Contribute frames, bytes-like, to an outer step; return what others contributed, once it is closed.

        `consumed` is how many samples the island has read for it. The frames are there when `ready` returns
        the checksum of its outer weights, and must stay as they are until the step is closed. The Future
        raises HubRefused.
        """
        views = [memoryview(frame) for frame in frames]
        views = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
        sizes, got = [view.nbytes for view in views], _Got()
        if sizes and max(sizes) > MOST_FRAME:
            raise ValueError(f"a frame of {max(sizes):,} bytes: must be at most {MOST_FRAME:,}")

        def work(wire: Wire) -> Outcome:
            offer = {"step": step, "sizes": sizes, "consumed": consumed, "weights": ready()}
            if _asked(wire, {"do": "contribute", **offer})["send"]:
                try:
                    for view in views:
                        wire.send_payload(view)
                except OSError:
                    with suppress(EOFError):
                        _answer(wire)  # the hub may have said why it closed the connection
                    raise
            answer = _asked(wire, {"do": "await", "step": step})
            while "waiting" in answer:
                if failed := answer.get("failed_another"):
                    self._tell(f"it says {failed}", again=True)
                else:
                    self._reached()
                answer = _answer(wire)
            of_another_start = answer["members"].get(self._island, {}).get("start") != self._start
            return self._fetch(wire, step, answer, choose, got, own=of_another_start)

        return self._submit(work)

    def past(self, step: int, choose: Choose) -> Future[Outcome]:
        """Return a closed step, with the frames of this island too. The Future raises HubRefused."""
        got = _Got()

        def work(wire: Wire) -> Outcome:
            return self._fetch(wire, step, _asked(wire, {"do": "past", "step": step}), choose, got, own=True)

        return self._submit(work)

    def newest(self) -> Future[tuple[int, float, float]]:
        """Return the newest closed step, or -1, and seconds: since then, and from the one before.

        The hub awaits this island at the next step from now on. Seconds are 0 if they are not known.
        """

        def work(wire: Wire) -> tuple[int, float, float]:
            answer = _asked(wire, {"do": "newest"})
            newest = -1 if answer["newest"] is None else answer["newest"]
            return newest, answer["since"], answer["period"]

        return self._submit(work)

    def close(self, *, ended: bool) -> None:
        """Close the connection, and cancel what is not done; `ended`: the island has ended, and says so."""
        if ended:
            with suppress(Exception, CancelledError):  # without it the others wait for this island once
                self._submit(lambda wire: _asked(wire, {"do": "end"})).result(_GOODBYE)
        self._closed.set()
        self._tasks.put((lambda wire: None, Future()))  # or the thread would wait for one
        if wire := self._wire:
            wire.shutdown()
        self._thread.join(_GOODBYE)

    def _submit(self, work: Callable[[Wire], _Result]) -> Future[_Result]:
        assert not self._closed.is_set(), "the link is closed"
        future: Future[_Result] = Future()
        self._tasks.put((work, future))
        return future

    def _run(self) -> None:
        """The thread: does a task until it succeeds, or the hub refuses it."""
        task: _Task | None = None
        while not self._closed.is_set():
            try:
                task = task or self._next()
                wire = self._connect()
                if task:
                    task[1].set_result(task[0](wire))
                    task = None
                self._reached()
            except (OSError, EOFError) as error:
                self._lost(error)
            except Exception as error:
                if not isinstance(error, HubRefused):
                    self._lost(error)  # the rest of an answer may be on its way
                if task:
                    task[1].set_exception(error)
                    task = None
        self._drop()
        if task:
            task[1].set_exception(CancelledError())
        while not self._tasks.empty():
            self._tasks.get()[1].cancel()

    def _next(self) -> _Task | None:
        """Return the next task; None if none comes soon, or at once without a connection. Raises EOFError."""
        if self._wire and self._tasks.empty() and self._wire.readable():
            raise EOFError("the hub has closed the connection")
        try:
            task = self._tasks.get(timeout=_IDLE if self._wire or self._refusal else 0)
        except queue.Empty:
            return None
        return task if task[1].set_running_or_notify_cancel() else None

    def _connect(self) -> Wire:
        """Return the connection, after making one if there is none. Raises HubRefused, OSError, EOFError."""
        if self._refusal:
            raise HubRefused(self._refusal)
        if self._wire:
            return self._wire
        connected = socket.create_connection(self._place, timeout=_CONNECT)
        self._wire = wire = Wire(connected, self.traffic, silence=LOST_AFTER)
        try:
            wire.authenticate(self._secret, hub=False)
            if _asked(wire, self._hello)["layout"]:
                wire.send_text(self._layout)
            if note := _answer(wire).get("note"):
                self._say(f"WARNING: {note}")
        except AuthenticationError:
            self._refusal = f"--island-secret: the hub at {self._address} has another secret"
        except HubRefused as refusal:
            self._refusal = str(refusal)
        if self._refusal:
            self._drop()
            raise HubRefused(self._refusal)
        return wire

    def _reached(self) -> None:
        self._losses = 0
        if self._told:
            self._told = ""
            self._say(f"--islands-at {self._address}: connected to the hub again")

    def _lost(self, error: BaseException) -> None:
        """Say so, and pause before the next attempt."""
        self._drop()
        if self._closed.is_set():
            return
        silent = isinstance(error, BlockingIOError)  # of a read that waited LOST_AFTER
        why = "it is silent" if silent else str(error) or "it closed the connection"
        self._tell(why, again=isinstance(error, _HubFailed))
        self._closed.wait(_PAUSES[min(self._losses, len(_PAUSES) - 1)])
        self._losses += 1

    def _tell(self, why: str, *, again: bool) -> None:
        """Say what is wrong, once; `again`: also where something else was said before."""
        if not self._told or (again and why != self._told):
            self._told = why
            self._say(
                f"--islands-at {self._address}: no connection to the hub ({why}); trying until it is there"
            )

    def _drop(self) -> None:
        if wire := self._wire:
            self._wire = None
            wire.close()

    def _fetch(
        self, wire: Wire, step: int, answer: Message, choose: Choose, got: _Got, *, own: bool
    ) -> Outcome:
        """Fetch the chosen frames of members that `got` lacks, and return all."""
        members = answer["members"]
        chosen = {name: members[name]["layouts"] for name in members if own or name != self._island}
        lacking = sorted({digest for digests in chosen.values() for digest in digests} - self._layouts.keys())
        if lacking:
            wire.send({"do": "layouts", "digests": lacking})
            self._layouts |= {digest: wire.receive_text().decode() for digest in lacking}
        indices = {
            (name, rank): list(which)
            for name, digests in chosen.items()
            for rank, which in enumerate(choose([self._layouts[digest] for digest in digests]))
        }
        wanted = [(*place, which) for place, which in indices.items() if which and place not in got]
        if wanted:
            wire.send({"do": "fetch", "step": step, "wanted": wanted})
            for name, rank, _ in wanted:
                got[name, rank] = [wire.receive_payload(self._room(size)) for size in _answer(wire)["sizes"]]
        frames: dict[str, list[Frame]] = {name: [] for name in chosen}
        for (name, rank), which in indices.items():
            layout = self._layouts[chosen[name][rank]]
            frames[name] += [
                Frame(layout, *each) for each in zip(which, got.get((name, rank), ()), strict=False)
            ]
        consumed, weights = (
            {name: member[key] for name, member in members.items()} for key in ("consumed", "weights")
        )
        return Outcome(step, tuple(members), frames, consumed, weights, answer.get("late", 0.0))


def _asked(wire: Wire, request: Message) -> Message:
    """Return the hub's answer to a request. Raises HubRefused, OSError, EOFError."""
    wire.send(request)
    return _answer(wire)


def _answer(wire: Wire) -> Message:
    answer = wire.receive()
    if "refused" in answer:
        raise HubRefused(answer["refused"])
    if "failed" in answer:
        raise _HubFailed(f"it says {answer['failed']}")
    return answer


def _close_in_forks(link: Link) -> None:
    """Let a forked child of this process, such as a data loader's worker, not hold the connection."""
    reference = weakref.ref(link)

    def close() -> None:
        if there := reference():
            there._drop()

    os.register_at_fork(after_in_child=close)
