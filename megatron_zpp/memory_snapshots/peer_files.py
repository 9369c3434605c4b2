"""Sends files between ranks over TCP, beside their collectives: a server per rank, a connection per file.

A request is a line of JSON, {"secret": …, "put": NAME, "bytes": N} followed by N bytes, or {"secret": …,
"get": NAME}. The answer is a line of JSON: {"problem": TEXT}, or {} after a `put`, or {"bytes": N} followed
by N bytes after a `get`. Nothing is encrypted, as in the collectives of a run. The secret, which all ranks of
a run share, keeps out other programs that reach the port.
"""

import hmac
import json
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_zpp.storage.checksums import OnProgress, no_report
from megatron_zpp.storage.files import open_new

NAME = re.compile(r"iter_\d{7,15}-[0-9a-f]{8}/rank_\d{5,9}\.(safetensors|json)")  # of files that may travel
SILENCE = 30.0  # seconds without a byte after which a transfer fails
_LINE = 4096  # bytes of a request or an answer
_PIECE = 1 << 20  # bytes read at a time


class TransferFailed(OSError):
    """A file did not arrive whole: the other rank is gone, or refused it."""


class Peer(NamedTuple):
    """Where the server of a rank listens, and the secret of the run."""

    host: str
    port: int
    secret: str


class FileServer:
    """Puts files of other ranks into a directory, and sends them files that this rank finds, on threads."""

    def __init__(self, secret: str, directory: Path, find: Callable[[str], Path | None]) -> None:
        """Listen on a free port of all addresses of this machine. Raises OSError.

        `find` returns the path of a file with the name that is asked for, or None.
        """
        self._server = _Server(secret, directory, find)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; when this returns, no transfer writes to the directory."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_transfers()


def put_file(peer: Peer, source: Path, name: str) -> None:
    """Send a file to the directory of a server, where it gets its name when it is whole. Raises OSError."""
    with source.open("rb") as file, _request(peer) as connection:
        size = os.fstat(file.fileno()).st_size
        _send_line(connection, {"secret": peer.secret, "put": name, "bytes": size})
        connection.sendfile(file)
        with connection.makefile("rb") as answers:
            _answer(answers)


def get_file(peer: Peer, name: str, target: Path, on_progress: OnProgress = no_report) -> None:
    """Fetch the file that a server finds. Raises OSError; `target` is whole or not there.

    `on_progress` is called after every MiB.
    """
    with _request(peer) as connection, connection.makefile("rb") as answers:
        _send_line(connection, {"secret": peer.secret, "get": name})
        _receive(answers, _answer(answers)["bytes"], target, on_progress)


class _Server(socketserver.TCPServer):
    """Answers each connection on a thread of its own."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, secret: str, directory: Path, find: Callable[[str], Path | None]) -> None:
        self.secret, self.directory, self.find = secret, directory, find
        self._transfers: dict[threading.Thread, socket.socket] = {}
        super().__init__(("", 0), _Handler)

    def server_bind(self) -> None:
        """Bind to IPv4 addresses too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection."""
        for ended in [thread for thread in self._transfers if not thread.is_alive()]:
            del self._transfers[ended]
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        self._transfers[thread] = request
        thread.start()

    def end_transfers(self) -> None:
        """Cut connections, and wait for their threads."""
        for thread, connection in self._transfers.items():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _serve(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):  # the other rank is gone
            self.finish_request(request, client_address)
        self.shutdown_request(request)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = SILENCE

    def handle(self) -> None:
        """Answer one request."""
        try:
            request = _read_line(self.rfile)
            secret = str(request.get("secret"))
            if not hmac.compare_digest(secret.encode(), self.server.secret.encode()):
                return  # a stranger: no answer
            name = str(request.get("put", request.get("get")))
            if not NAME.fullmatch(name):
                raise TransferFailed(f"{name!r} is not a name of a copy")
            if "put" in request:
                path = self.server.directory / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _receive(self.rfile, request["bytes"], path)
                _send_line(self.connection, {})
                return
            found = self.server.find(name)
            if found is None:
                raise TransferFailed(f"{name} is not there")
            with found.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                _send_line(self.connection, {"bytes": size})
                self.connection.sendfile(file)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            with suppress(OSError):
                _send_line(self.connection, {"problem": f"{error}"[: _LINE // 8]})


@contextmanager
def _request(peer: Peer) -> Iterator[socket.socket]:
    """A connection to the server of a rank; its errors name the server."""
    try:
        with socket.create_connection((peer.host, peer.port), timeout=SILENCE) as connection:
            yield connection
    except TransferFailed as failure:
        raise TransferFailed(f"{peer.host}:{peer.port}: {failure}") from None
    except OSError as error:
        raise TransferFailed(f"{peer.host}:{peer.port}: {error.strerror or error}") from None


def _receive(stream: Any, size: int, target: Path, on_progress: OnProgress = no_report) -> None:
    """Write `size` bytes of a stream to a file, which gets its name when it is whole."""
    partial = target.with_name(f"{target.name}.partial")
    try:
        with os.fdopen(open_new(partial), "wb", buffering=0) as file:
            piece = memoryview(bytearray(min(_PIECE, size)))
            while size:
                count = stream.readinto(piece[: min(size, len(piece))])
                if not count:
                    raise TransferFailed(f"{target.name} was cut off {size} bytes before its end")
                left = piece[:count]
                while len(left):  # a write may be partial
                    left = left[file.write(left) :]
                size -= count
                on_progress()
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _send_line(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _answer(stream: BinaryIO | Any) -> dict[str, Any]:
    try:
        answer = _read_line(stream)
    except ValueError:
        raise TransferFailed("closed the connection without an answer") from None
    if "problem" in answer:
        raise TransferFailed(answer["problem"])
    return answer


def _read_line(stream: BinaryIO | Any) -> dict[str, Any]:
    """A request or an answer. Raises ValueError for other data."""
    line = stream.readline(_LINE)
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("bytes", 0), int) or value.get("bytes", 0) < 0:
        raise ValueError(f"not a message of a run: {line[:100]!r}")
    return value
