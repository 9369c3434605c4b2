"""Messages between a rank of an island and the hub: JSON objects, texts and payload on one TCP connection.

Both ends prove that they know the secret by the HMAC challenges of multiprocessing.connection. Nothing is
encrypted, and nothing is unpickled.
"""

import contextlib
import json
import socket
import struct
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, BinaryIO

MOST_TEXT = 16 << 20  # bytes of a JSON object or a layout
MOST_FRAME = 1 << 30  # bytes of a frame
LOST_AFTER = 20  # seconds without an answer from the other host
TOO_SLOW = "a longer --wait of the hub, or a smaller batch of this island, would include it"
_PIECE = 1 << 20  # bytes that are read at once to be written to a file
_HANDSHAKE = 10.0  # seconds for both challenges
_LAST_WORDS = 2.0  # seconds for the other host to read why the connection ends
_PREFIX = 4  # bytes before a text, with its length

Message = dict[str, Any]


class HubRefused(ValueError):
    """The hub refuses a request, or all of an island; the message is one line for the user."""


@dataclass
class Traffic:
    """Bytes that were sent and received, of payload and headers."""

    sent: int = 0
    received: int = 0


class Wire:
    """A connected socket. A text has its length before it; payload has none, because a text announced it.

    Methods raise OSError or EOFError when the connection is lost, ValueError for a message that is none.
    """

    def __init__(self, connected: socket.socket, traffic: Traffic, *, silence: int = 0) -> None:
        """A read fails after `silence` seconds without a byte; 0: never while the other host is there."""
        connected.setblocking(True)
        tcp = socket.IPPROTO_TCP
        connected.setsockopt(tcp, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(tcp, socket.TCP_KEEPIDLE, LOST_AFTER // 2)
        connected.setsockopt(tcp, socket.TCP_KEEPINTVL, LOST_AFTER // 4)
        connected.setsockopt(tcp, socket.TCP_KEEPCNT, 2)
        connected.setsockopt(tcp, socket.TCP_USER_TIMEOUT, LOST_AFTER * 1000)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", silence, 0))
        self._socket, self._traffic = connected, traffic
        self._texts = Connection(connected.dup().detach())

    def authenticate(self, secret: bytes, *, hub: bool) -> None:
        """Prove to each other that both ends have the secret. Raises AuthenticationError."""
        limit = threading.Timer(_HANDSHAKE, self.shutdown)  # a stranger may send a byte now and then
        limit.start()
        try:
            for step in (
                (deliver_challenge, answer_challenge) if hub else (answer_challenge, deliver_challenge)
            ):
                step(self._texts, secret)
        except AssertionError:  # of Python before 3.12, for what is no challenge
            raise EOFError("another program is there") from None
        finally:
            limit.cancel()

    def send(self, message: Message) -> None:
        self.send_text(json.dumps(message).encode())

    def receive(self) -> Message:
        message = json.loads(self.receive_text())
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def send_text(self, text: bytes) -> None:
        self._texts.send_bytes(text)
        self._traffic.sent += len(text) + _PREFIX

    def receive_text(self) -> bytes:
        text = self._texts.recv_bytes(MOST_TEXT)
        self._traffic.received += len(text) + _PREFIX
        return text

    def send_payload(self, data: memoryview) -> None:
        self._socket.sendall(data)
        self._traffic.sent += data.nbytes

    def send_file(self, file: BinaryIO, offset: int, size: int) -> None:
        """Send a part of a file."""
        if size and self._socket.sendfile(file, offset, size) != size:
            raise OSError(f"{file.name} is too short")
        self._traffic.sent += size

    def receive_payload(self, data: Any) -> Any:
        """Receive as many bytes as `data` has, into it."""
        self._fill(memoryview(data))
        return data

    def receive_file(self, file: BinaryIO, size: int) -> None:
        """Receive `size` bytes of payload, and append them to a file."""
        buffer = memoryview(bytearray(min(size, _PIECE)))
        while size:
            part = buffer[:size]
            self._fill(part)
            file.write(part)
            size -= part.nbytes

    def _fill(self, data: memoryview) -> None:
        while data.nbytes:
            # a frame in one call: each return takes the interpreter from the thread that trains
            count = self._socket.recv_into(data, 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError("the connection ended inside a frame")
            self._traffic.received += count
            data = data[count:]

    def readable(self, seconds: float = 0.0) -> bool:
        """Whether something has come, or the connection has ended; waits for it."""
        return self._texts.poll(seconds)

    def send_last(self, message: Message) -> None:
        """Send a message, and discard what comes until the other host ends the connection, or a while.

        To close beside unread bytes resets the connection, and the reset may overtake the message.
        """
        limit = threading.Timer(_LAST_WORDS, self.shutdown)
        limit.start()
        with contextlib.suppress(OSError):  # the other host has gone
            self.send(message)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_PIECE):
                pass
        limit.cancel()

    def shutdown(self) -> None:
        """Let every read and write of this connection fail, in any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; only the thread that reads may do it."""
        self._texts.close()
        self._socket.close()
