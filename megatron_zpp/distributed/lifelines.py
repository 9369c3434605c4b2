"""Connections of all ranks to rank 0, which carry heartbeats, and whose closing tells that a rank has ended.

The kernel closes the connections of a process that ends, whatever ended it. All ranks see the end of rank 0,
and rank 0 sees that of any other rank and tells the rest. A rank that ends knowingly says so before, and its
closing then means nothing. A rank that is stopped keeps its connection. A host without power or network
closes nothing: that is found by heartbeats alone.

A message is a JSON object on a line. The first one of each side is its hello: token, rank and host. Later
ones have one key: `connected`, the rank has got rank 0's hello; `beat`, a heartbeat message; `bye`, the rank
is about to end; `ended`, the text on a rank that ends the run.
"""

import errno
import fcntl
import hmac
import json
import os
import platform
import selectors
import socket
import sys
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from megatron_zpp.distributed.job_store import derived
from megatron_zpp.distributed.topology import Topology

Message = dict[str, Any]
_LONGEST = 1 << 16  # bytes of a message
_TICK = 1.0  # seconds, at most, after which a thread sees that this rank leaves
_GRACE = 0.3  # seconds for this rank to be ended by what may have ended the other one, such as Ctrl-C
_DELIVERY = 0.5  # seconds, at most, for the last words to arrive at hosts that may be gone
_CONNECT = 5.0  # seconds for one attempt
_GIVE_UP = 60.0  # seconds after all ranks were there: rank 0 may be loading libraries
_PAUSE = 0.1  # seconds between two attempts


def hello_token(token: str, rank: int) -> str:
    """What a rank's hello has, from which `token` cannot be found: nobody is believed who repeats a hello."""
    return derived(token.encode(), f"hello of rank {rank}").hex()


class Lifelines:
    """The connection of one rank to rank 0, or on rank 0 those of all others, and a thread that reads.

    `ended` is called, from that thread, when another rank ends the run, such as one that has ended without
    saying so, or when this rank cannot connect; at most once, and not after `leave`. It may be replaced at
    any time. `beats` are the newest heartbeat messages of other ranks.
    """

    def __init__(self, topology: Topology, ended: Callable[[str], None]) -> None:
        self.ended = ended
        self.beats: dict[int, Message] = {}
        self._rank, self._world_size = topology.rank, topology.world_size
        self._token = ""
        self._listener: socket.socket | None = None
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()
        self._silent, self._present = False, 0.0
        _close_in_forks(self)

    def listen(self) -> int:
        """On rank 0: listen for the other ranks, and return the port; to be followed by `start`."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
        return self._listener.getsockname()[1]

    def start(self, port: int, address: str, token: str) -> None:
        """Begin to connect, and to read; rank 0 listens at `address`. Returns at once.

        `token` is known to the ranks of the job alone: who does not send it is no rank.
        """
        self._token = token
        work = self._serve if self._rank == 0 else self._follow
        given = () if self._rank == 0 else (address, port)
        threading.Thread(target=work, args=given, name="lifelines", daemon=True).start()

    def all_present(self) -> None:
        """Tell that all ranks have started: from now on a connection that cannot be made is reported."""
        self._present = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether this rank is connected; on rank 0, whether all are, and hear the news."""
        connected = sum(connection.confirmed for connection in self._connections)
        return connected == (self._world_size - 1 if self._rank == 0 else 1)

    def beat(self, message: Message) -> None:
        """Send a heartbeat message to rank 0, or from it to all others."""
        with self._lock:
            self._send({"beat": message})

    def tell(self, text: str) -> None:
        """Act on the end of the run, after telling the others on rank 0, unless this rank has left."""
        with self._lock:
            if self._silent:
                return
            if self._rank == 0:
                self._send_last({"ended": text})
            self._silent = True
        self.ended(text)

    def leave(self) -> None:
        """Say that this process ends, so that its closing is no news; hear nothing from now on."""
        with self._lock:  # a thread closes everything once this rank is silent, so not before the words
            self._send_last({"bye": True})
            self._silent = True

    def close(self) -> None:
        """Close everything, without a word."""
        for connection in self._connections:
            connection.socket.close()
        if self._listener:
            self._listener.close()

    def _serve(self) -> None:
        """The thread of rank 0."""
        assert self._listener is not None, "listen makes it"
        self._listener.setblocking(False)
        suspects: list[tuple[float, str]] = []  # when to tell that a rank has ended, and the text
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._silent:
                until = min([time.monotonic() + _TICK, *(when for when, _ in suspects)])
                for key, _ in selector.select(max(0.0, until - time.monotonic())):
                    if key.data is None:
                        self._accept(self._listener, selector)
                    elif text := self._read(key.data, selector):
                        suspects.append((time.monotonic() + _GRACE, text))
                now = time.monotonic()
                for connection in list(self._connections):  # a stranger sends no hello
                    if connection.rank is None and now > connection.since + _CONNECT:
                        self._drop(connection, selector)
                for when, text in suspects:
                    if now >= when:
                        self.tell(text)
                        break
        self.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connection = _Connection(listener.accept()[0], seconds=0)
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            with self._lock:
                self._connections.append(connection)

    def _read(self, connection: "_Connection", selector: selectors.BaseSelector) -> str | None:
        """On rank 0: read what has come from a rank. Returns the text if the rank has ended."""
        try:
            connection.receive()
        except _Closed as closed:
            text = connection.end(closed)
            if text is None:
                self._drop(connection, selector)
            else:  # it stays among the connections: all other ranks hear the news
                selector.unregister(connection.socket)
            return text
        for message in connection.messages():
            if connection.rank is not None:
                if "beat" in message:
                    self.beats[connection.rank] = message["beat"]
                continue
            if not self._is_awaited(message):
                self._drop(connection, selector)
                break
            with self._lock:
                connection.greet(message)
                connection.send(self._hello())
                if self._silent:
                    connection.send({"bye": True})
        return None

    def _is_awaited(self, hello: Message) -> bool:
        """Whether a hello is that of a rank which is not connected yet."""
        connected = {connection.rank for connection in self._connections}
        rank = hello.get("rank")
        if not isinstance(rank, int) or rank not in range(1, self._world_size) or rank in connected:
            return False
        return _has_token(hello, hello_token(self._token, rank))

    def _drop(self, connection: "_Connection", selector: selectors.BaseSelector) -> None:
        selector.unregister(connection.socket)
        with self._lock:
            self._connections.remove(connection)
        connection.socket.close()

    def _follow(self, address: str, port: int) -> None:
        """The thread of any other rank: connect to rank 0, and read until one of the two is silent."""
        connection = self._connect(address, port)
        while connection and not self._silent:
            for message in connection.messages():  # some may have come with the hello
                if "beat" in message:
                    self.beats[0] = message["beat"]
                elif text := message.get("ended"):
                    self.tell(text)
            try:
                connection.receive()
            except _Closed as closed:
                if text := connection.end(closed):
                    time.sleep(_GRACE)
                    self.tell(text)
                break
        self.close()

    def _connect(self, address: str, port: int) -> "_Connection | None":
        """Connect to rank 0, which may not listen yet; None if this rank leaves, or cannot, which ends it."""
        while not self._silent:
            connection = None
            try:
                connected = socket.create_connection((address, port), timeout=_CONNECT)
                connection = _Connection(connected, seconds=_TICK)
                connection.send(self._hello())
                connection.await_hello(hello_token(self._token, 0), _CONNECT)
            except (OSError, _Closed) as error:
                if connection:
                    connection.socket.close()
                if self._present and time.monotonic() > self._present + _GIVE_UP:
                    self.tell(
                        f"MASTER_ADDR {address}: rank {self._rank} on {platform.node()} cannot connect to "
                        f"rank 0 at port {port} ({error}); let nodes reach each other at all ports"
                    )
                    return None
                time.sleep(_PAUSE)
                continue
            with self._lock:
                connection.send({"connected": True})
                self._connections.append(connection)
                if self._silent:  # since the hello, which rank 0 has
                    connection.send({"bye": True})
            return connection
        return None

    def _hello(self) -> Message:
        token = hello_token(self._token, self._rank)
        return {"token": token, "rank": self._rank, "host": platform.node()}

    def _send(self, message: Message) -> None:
        """Send a message to rank 0, or from it to all others; holding the lock."""
        for connection in self._connections:
            if connection.rank is not None:
                connection.send(message)

    def _send_last(self, message: Message) -> None:
        """Send what has to arrive before this process closes its connections, which may reset them."""
        self._send(message)
        deadline = time.monotonic() + _DELIVERY
        while any(each.in_flight for each in self._connections) and time.monotonic() < deadline:
            time.sleep(0.001)


class _Closed(Exception):
    """The connection is at its end: `by_network` if that says nothing about the process at the other end."""

    def __init__(self, why: str, *, by_network: bool = False) -> None:
        super().__init__(why)
        self.by_network = by_network


class _Connection:
    """A connected socket. `rank` is None until the hello has come; `left` is whether a `bye` has.

    `confirmed` is whether both sides have got a hello: one that waited too long for it closes the connection,
    and tries again.
    """

    def __init__(self, connected: socket.socket, *, seconds: float) -> None:
        """A request to read waits for `seconds`."""
        self.socket, self._seconds = connected, seconds
        self.rank: int | None = None
        self.confirmed, self.left = False, False
        self.since = time.monotonic()
        self._host, self._doing = "?", "starting"
        self._received, self._unsent = b"", b""
        connected.settimeout(seconds)

    def greet(self, hello: Message) -> None:
        """Take note of who is at the other end."""
        self.rank, self._host = hello["rank"], hello["host"]

    def await_hello(self, token: str, seconds: float) -> None:
        """Wait for the hello of the other end. Raises _Closed if none with this token comes, OSError."""
        deadline = time.monotonic() + seconds
        while (hello := next(self.messages(), None)) is None:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            self.receive()
            if time.monotonic() > deadline:
                raise _Closed("no answer")
        self.socket.settimeout(self._seconds)
        if not _has_token(hello, token):
            raise _Closed("another program answers there")
        self.greet(hello)
        self.confirmed = True

    def send(self, message: Message) -> None:
        """Send without waiting; what a stopped process does not read is kept, but for many heartbeats."""
        if len(self._unsent) < _LONGEST or "beat" not in message:
            self._unsent += json.dumps(message).encode() + b"\n"
        # An error means that the other end is gone, which the reader of this socket finds.
        with suppress(OSError):
            while self._unsent:
                sent = self.socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]

    @property
    def in_flight(self) -> bool:
        """Whether the other host has not acknowledged all that was sent."""
        with suppress(OSError, ValueError):  # it may be closed
            unacknowledged = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
            return int.from_bytes(unacknowledged, sys.byteorder) > 0
        return False

    def receive(self) -> None:
        """Read what has come. Raises _Closed at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, TimeoutError) as error:
            if error.errno == errno.ETIMEDOUT:  # the network's, not that of settimeout
                raise _Closed(str(error), by_network=True) from None
            return
        except OSError as error:
            by_process = isinstance(error, ConnectionResetError | BrokenPipeError)
            raise _Closed(error.strerror or str(error), by_network=not by_process) from None
        if not data:
            raise _Closed("the other end has closed it")
        self._received += data
        if len(self._received) > _LONGEST and b"\n" not in self._received:
            raise _Closed("this is no message", by_network=True)

    def messages(self) -> Iterator[Message]:
        """The whole messages that have come, after taking note of what they say about the other end."""
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # a stranger's
                continue
            if isinstance(message, dict):
                if self.rank is not None:
                    self.confirmed = True
                    self.left = self.left or "bye" in message
                    self._doing = message.get("beat", {}).get("doing", self._doing)
                yield message

    def end(self, closed: _Closed) -> str | None:
        """The text on the process at the other end; None if its end is no news, or it may not have ended."""
        if self.rank is None or not self.confirmed or self.left or closed.by_network:
            return None
        name = f"rank {self.rank} [{self._host}]"
        return f"{name} has ended without a word: killed, or crashed; last seen: {self._doing}"


def _has_token(hello: Message, token: str) -> bool:
    return hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), token.encode())


def _close_in_forks(lifelines: Lifelines) -> None:
    """Let a forked child of this process, such as a data loader's worker, hold none of its connections."""
    reference = weakref.ref(lifelines)

    def close() -> None:
        if there := reference():
            there.close()

    os.register_at_fork(after_in_child=close)
