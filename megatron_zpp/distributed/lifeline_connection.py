"""One lifeline: a socket between two ranks, who is at its other end, and the messages on it.

A message is a JSON object on a line. The first one of each side is its hello: token, rank and host. Later
ones have one key: `doing`, what the rank does; `bye`, it is about to end; `complete`, whether all ranks below
it are connected; `ended`, the text on a rank that has ended without a `bye`.
"""

import errno
import hmac
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from megatron_zpp.distributed.process_end import OtherProcess

Message = dict[str, Any]
_LONGEST = 1 << 16  # bytes of a message


class Closed(Exception):
    """The connection is at its end: `by_network` if that says nothing about the process at the other end."""

    def __init__(self, why: str, *, by_network: bool = False) -> None:
        super().__init__(why)
        self.by_network = by_network


class Connection:
    """A connected socket. `rank` is None until the hello has come; `left` is whether a `bye` has.

    `confirmed` is whether both sides have got a hello: one that waited too long for it closes the connection,
    and tries again. `process` is the process at the other end, if that is on this host.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.rank: int | None = None
        self.confirmed, self.left = False, False
        self.since = time.monotonic()
        self.process = OtherProcess.at_other_end(connected) if connected.family == socket.AF_UNIX else None
        self._host, self._doing = "?", "starting"
        self._received, self._unsent = b"", b""
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)

    @classmethod
    def to_port(cls, address: str, port: int, seconds: float) -> "Connection":
        """Connect by TCP. Raises OSError."""
        return cls(socket.create_connection((address, port), timeout=seconds))

    @classmethod
    def to_unix_socket(cls, name: str, seconds: float) -> "Connection":
        """Connect to an abstract Unix socket. Raises OSError."""
        connecting = socket.socket(socket.AF_UNIX)
        try:
            connecting.settimeout(seconds)
            connecting.connect(name)
        except OSError:
            connecting.close()
            raise
        return cls(connecting)

    def greet(self, hello: Message) -> None:
        """Take note of who is at the other end."""
        self.rank, self._host = hello["rank"], hello["host"]

    def await_hello(self, token: str, seconds: float) -> None:
        """Wait for the hello of the other end. Raises Closed if none with this token comes, OSError."""
        deadline = time.monotonic() + seconds
        while (hello := next(self.messages(), None)) is None:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self.receive()
            finally:
                self.socket.setblocking(False)
            if time.monotonic() > deadline:
                raise Closed("no answer")
        if not hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), token.encode()):
            raise Closed("another program answers there")
        self.greet(hello)
        self.confirmed = True

    def send(self, message: Message) -> None:
        """Send without waiting; what a stopped process does not read is kept, but for `doing`."""
        if not (self._unsent and "doing" in message):
            self._unsent += json.dumps(message).encode() + b"\n"
        # An error means that the other end is gone, which the reader of this socket finds.
        with suppress(OSError):
            while self._unsent:
                sent = self.socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]

    def receive(self) -> None:
        """Read what has come. Raises Closed at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, TimeoutError) as error:
            if error.errno == errno.ETIMEDOUT:  # the network's, not that of settimeout
                raise Closed(str(error), by_network=True) from None
            return
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Closed(error.strerror or str(error)) from None
        except OSError as error:
            raise Closed(error.strerror or str(error), by_network=True) from None
        if not data:
            raise Closed("the other end has closed it")
        self._received += data
        if len(self._received) > _LONGEST and b"\n" not in self._received:
            raise Closed("this is no message", by_network=True)

    def messages(self) -> Iterator[Message]:
        """The whole messages that have come, after taking note of what they say about the other end."""
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # a stranger's
                continue
            if not isinstance(message, dict):
                continue
            self._doing = str(message.get("doing", self._doing))
            self.left = self.left or "bye" in message
            self.confirmed = self.confirmed or self.rank is not None
            yield message

    def describe(self, end: str | None) -> str:
        """A line on the end of the process at the other end, which has not said that it would end."""
        if end is None:
            what = "has ended without a word: killed, or crashed"
        else:
            what = f"was killed by {end}" if end.startswith("SIG") else f"has ended with {end}"
        return f"rank {self.rank} [{self._host}] {what}; last seen: {self._doing}"

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
