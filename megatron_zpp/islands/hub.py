"""The hub of islands: takes the frames of each outer step, and decides which islands are its members.

A thread per connection answers the requests of one rank, in order. The main thread closes steps: when every
awaited island is whole, or some seconds after the first one was. An island is awaited while it has
connections, and shortly after it lost them. One that did not come to a step in time is not awaited until it
contributes to an open step or connects again.
"""

import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import AuthenticationError

from megatron_zpp.config.options import printable
from megatron_zpp.config.values.addresses import joined
from megatron_zpp.islands.log import Contribution, OuterLog
from megatron_zpp.islands.messages import MOST_FRAME, TOO_SLOW, HubRefused, Message, Traffic, Wire

_HELLO = ("island", "rank", "ranks", "start", "layout", "length")
_RETURN = 3.0  # seconds for an island to connect again, after its longest pause between attempts
_TICK = 1.0  # seconds after which a rank that waits hears that the hub is there


@dataclass(eq=False)
class _Rank:
    """A connected rank."""

    island: str
    rank: int
    ranks: int
    start: str
    layout: str  # its digest
    length: int  # --train-iters
    wire: Wire


@dataclass
class _Island:
    connections: dict[int, _Rank] = field(default_factory=dict)
    start: str | None = None
    ranks: int = 0
    former: set[str | None] = field(default_factory=set)  # earlier starts
    until: float = 0.0  # until when it is awaited
    ended: bool = False
    failed: tuple[int, int, str] = -1, -1, ""  # step, and first rank, whose frames were not written; why


class Hub:
    """Serves a log of outer steps; `say` gets a line when a step closes, and when an island comes or goes."""

    def __init__(
        self, log: OuterLog, names: Sequence[str], *, wait: float, quorum: int, say: Callable[[str], None]
    ) -> None:
        self._log, self._wait, self._quorum, self._say = log, wait, quorum, say
        self._lock = threading.Lock()
        self._changed, self._closed, self._left = (threading.Condition(self._lock) for _ in range(3))
        self._islands = {name: _Island() for name in names}
        self._times = deque[float]([], 100)  # when the first islands of the newest steps were whole
        # All begin together, and islands of an earlier hub on this log connect again soon.
        there = names if log.newest is None else log.members(log.newest)
        for name in there:
            self._islands[name].until = math.inf

    def serve(self, listener: socket.socket, secret: bytes) -> None:
        """Serve until an exception, such as that of a signal."""
        threading.Thread(target=self._accept, args=(listener, secret), daemon=True).start()
        since = None  # when the first island of the open step was whole
        while True:
            with self._lock:
                whole = self._log.whole()
                if not whole:
                    since = None
                    self._changed.wait()
                    continue
                now = time.monotonic()
                since = since or now
                missing = {
                    name: island
                    for name, island in self._islands.items()
                    if name not in whole and island.until > since
                }
                due = min(since + self._wait, max((each.until for each in missing.values()), default=0.0))
                if len(whole) < self._quorum or now < due:
                    self._changed.wait(due - now if now < due else None)
                    continue
                waited = now - since
                for island in missing.values():
                    island.until = 0.0
                self._times.append(since)
                step, nbytes, since = self._log.open_step, self._log.close(), None
                self._closed.notify_all()
            members = " ".join(whole) + (f", without {' '.join(missing)}" if missing else "")
            self._say(f"outer step {step}: {members}; {nbytes:,} bytes; waited {waited:.1f} s")

    def _accept(self, listener: socket.socket, secret: bytes) -> None:
        while True:
            try:
                connected, address = listener.accept()
            except OSError as error:  # such as too many open files
                self._say(f"cannot accept a connection: {error}")
                time.sleep(1.0)
                continue
            shown = joined(*address[:2])
            threading.Thread(target=self._serve, args=(connected, shown, secret), daemon=True).start()

    def _serve(self, connected: socket.socket, address: str, secret: bytes) -> None:
        """The thread of a connection."""
        wire, peer = Wire(connected, Traffic()), None
        try:
            wire.authenticate(secret, hub=True)
            peer, note = self._admit(wire, wire.receive())
            wire.send({"welcome": True} | ({"note": note} if note else {}))
            while True:
                try:
                    self._answer(peer, wire.receive())
                except HubRefused as refusal:
                    wire.send({"refused": str(refusal)})
        except HubRefused as refusal:
            self._say(f"{address}: refused: {refusal}")
            with suppress(OSError):
                wire.send({"refused": str(refusal)})
        except AuthenticationError:
            self._say(f"{address}: has another secret than --secret-file")
        except (OSError, EOFError, ValueError, TypeError, LookupError) as error:
            if not peer or not isinstance(error, EOFError):
                who = f"rank {peer.rank} of {peer.island}" if peer else "no island"
                self._say(f"{address}: {who}: connection closed: {str(error) or type(error).__name__}")
        finally:
            if peer:
                self._leave(peer)
            wire.close()

    def _admit(self, wire: Wire, hello: Message) -> tuple[_Rank, str]:
        """Return the rank that says this hello, once no other one is in its place, and a note for its log.

        Raises HubRefused.
        """
        peer = _Rank(**{key: hello[key] for key in _HELLO}, wire=wire)
        if not (island := self._islands.get(peer.island)):
            names = " ".join(self._islands)
            raise HubRefused(f"--island {peer.island}: the hub has --names {names}; give one of these")
        if not 0 <= peer.rank < peer.ranks:
            raise ValueError(f"rank {peer.rank} of {peer.ranks}")
        with self._lock:
            wanted = not self._log.has_layout(peer.layout)
        wire.send({"layout": wanted})
        if wanted:
            text = wire.receive_text()
            with self._lock:
                self._log.add_layout(text)
        with self._lock:
            self._check_settings(peer.island, hello["settings"])
            if island.start != peer.start and peer.start not in island.former:
                island.former.add(island.start)
                island.start, island.ranks = peer.start, peer.ranks
            if peer.start == island.start and peer.ranks != island.ranks:
                raise HubRefused(
                    f"--island {peer.island}: rank {peer.rank} says that it has {peer.ranks} ranks, and its "
                    f"first rank said {island.ranks}; start all ranks together"
                )
            self._clear_place(peer, island)
            came = not island.connections
            island.connections[peer.rank] = peer
            island.until, island.ended = math.inf, False
            note = self._other_lengths(peer)
        if came:
            self._say(f"{peer.island} is here: {peer.ranks} ranks{note and f'; {note}'}")
        return peer, note

    def _other_lengths(self, peer: _Rank) -> str:
        """A note if islands that are here end elsewhere; all may start again one by one, to train longer."""
        ranks = (rank for island in self._islands.values() for rank in islice(island.connections.values(), 1))
        others = [f"{rank.island} has {rank.length}" for rank in ranks if rank.length != peer.length]
        alone = "islands that end first leave the rest to the others"
        return f"--train-iters {peer.length}: {', '.join(others)}; {alone}" if others else ""

    def _clear_place(self, peer: _Rank, island: _Island) -> None:
        """End connections of earlier starts, and of the same rank, which the network may have lost."""
        while True:
            if peer.start != island.start:
                raise HubRefused(f"--island {peer.island}: was started again; end the earlier start")
            old = [each for each in island.connections.values() if each.start != peer.start]
            old += [each for rank, each in island.connections.items() if rank == peer.rank]
            if not old:
                return
            for each in old:
                each.wire.shutdown()
            self._left.wait()

    def _check_settings(self, name: str, settings: Message) -> None:
        lonely = not any(island.connections for island in self._islands.values())
        first, known = self._log.settings_of(name, settings, lonely=lonely)
        for flag in sorted({*known, *settings}):
            own, other = (_shown(each, flag) for each in (settings, known))
            if own != other:
                raise HubRefused(
                    f"{flag} {own}: of island {name}, but {first} began the log with {other}; "
                    "give all islands the same, or the hub a new --directory"
                )

    def _leave(self, peer: _Rank) -> None:
        with self._lock:
            island = self._islands[peer.island]
            del island.connections[peer.rank]
            if gone := not island.connections and not island.ended:
                island.until = min(island.until, time.monotonic() + _RETURN)
            self._left.notify_all()
            self._changed.notify()
        if gone:
            self._say(f"{peer.island} is gone")

    def _answer(self, peer: _Rank, request: Message) -> None:
        """Answer a request of a rank. Raises HubRefused."""
        wire, do = peer.wire, request["do"]
        if do == "contribute":
            self._take(peer, request["step"], request["sizes"], request["consumed"], request["weights"])
        elif do == "await":
            while not self._is_closed(request["step"]):
                if wire.readable():
                    raise EOFError
                step, _, why = self._islands[peer.island].failed
                wire.send({"waiting": True, "failed_another": why if step == request["step"] else ""})
            self._tell_members(peer, request["step"])
        elif do == "past":
            wire.send({"members": self._members(request["step"])})
        elif do == "newest":
            self._tell_newest(peer)
        elif do == "layouts":
            for digest in request["digests"]:
                wire.send_text(self._log.layout(digest))
        elif do == "fetch":
            self._send_frames(wire, request["step"], request["wanted"])
        elif do == "end":
            self._end(peer)
        else:
            raise ValueError(f"unknown request {do}")

    def _take(self, peer: _Rank, step: int, sizes: list[int], consumed: int, weights: int) -> None:
        """Receive the frames of a rank, if the step lacks them."""
        if not isinstance(step, int) or step < 0 or not all(0 <= size <= MOST_FRAME for size in sizes):
            raise ValueError(f"step {step} is none, or has a frame of more than {MOST_FRAME:,} bytes")
        island = self._islands[peer.island]
        with self._lock:
            takes = self._log.takes(step, peer.island, peer.rank, peer.start)
            if takes:
                island.until = math.inf
        peer.wire.send({"send": takes})
        if takes:
            header = Contribution(peer.start, peer.ranks, peer.layout, sizes, int(consumed), int(weights))
            size = sum(sizes)
            try:
                self._log.write(
                    step, peer.island, peer.rank, header, lambda file: peer.wire.receive_file(file, size)
                )
            except OSError as error:  # such as of a full disk
                if island.failed[0] != step and not isinstance(error, ConnectionError | TimeoutError):
                    island.failed = step, peer.rank, str(error)
                peer.wire.send_last({"failed": str(error)})
                raise
            with self._lock:
                self._log.add(step, peer.island, peer.rank, header)
                if island.failed[1] == peer.rank:
                    island.failed = _Island.failed
                self._changed.notify()

    def _is_closed(self, step: int) -> bool:
        """Whether a step is closed; waits for it for a while."""
        with self._lock:
            return self._closed.wait_for(
                lambda: self._log.newest is not None and step <= self._log.newest, timeout=_TICK
            )

    def _tell_members(self, peer: _Rank, step: int) -> None:
        """Tell the members of a closed step, and an island that is none of them how much it was late."""
        with self._lock:
            members, late, age = self._log.members(step), 0.0, (self._log.newest or 0) - step
            if peer.island not in members and age < len(self._times):
                late = time.monotonic() - self._times[-1 - age]
        peer.wire.send({"members": members, "late": late})
        if late and peer.rank == 0:
            where = f"{late:.1f} s behind the first island at outer step {step}"
            self._say(f"{peer.island} was {where}, so what it trained is lost: {TOO_SLOW}")

    def _tell_newest(self, peer: _Rank) -> None:
        """Tell the newest step, and await the island, which continues from it, at the next one."""
        with self._lock:
            before, newest = (self._times[-2], self._times[-1]) if len(self._times) > 1 else (0.0, 0.0)
            since = time.monotonic() - newest if newest else 0.0
            answer = {"newest": self._log.newest, "since": since, "period": newest - before}
            self._islands[peer.island].until = math.inf
        peer.wire.send(answer)

    def _members(self, step: int) -> Message:
        with self._lock:
            return self._log.members(step)

    def _send_frames(self, wire: Wire, step: int, wanted: list[tuple[str, int, list[int]]]) -> None:
        """Send frames of a closed step: for each rank of `wanted` their sizes, then the frames."""
        members = self._members(step)
        for name, rank, indices in wanted:
            if rank not in range(len(members[name]["layouts"])):
                raise ValueError(f"{name} has no rank {rank}")
            try:
                with self._log.frames(step, name, rank) as (file, places):
                    wire.send({"sizes": [places[index][1] for index in indices]})
                    for index in indices:
                        wire.send_file(file, *places[index])
            except FileNotFoundError:
                with self._lock:
                    self._log.check_kept(step)
                raise

    def _end(self, peer: _Rank) -> None:
        with self._lock:
            island = self._islands[peer.island]
            said, island.ended, island.until = island.ended, True, 0.0
            self._changed.notify()
        peer.wire.send({})
        if not said:
            self._say(f"{peer.island} has ended")


def _shown(settings: Message, flag: str) -> str:
    value = settings.get(flag, "(not given)")
    if isinstance(value, list):
        return printable(" ".join(map(str, value)))
    return printable(value if isinstance(value, str) else json.dumps(value))
