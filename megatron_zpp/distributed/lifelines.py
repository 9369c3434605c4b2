"""Connections between ranks whose closing tells that a rank has ended, whatever ended it.

Lifelines form a tree. Rank 0 is its root: the first rank of every other node has a TCP connection to rank 0,
and the other ranks of a node have Unix sockets to its first rank. The kernel closes the connections of a
process that ends, so the ranks beside it in the tree know it at once. Each of them tells the ranks on its
side, and every rank hears it.

A rank that ends knowingly says so before, and its closing then means nothing. A rank that is stopped keeps
its connections. A host without power or network closes nothing: that is found by heartbeats alone.
"""

import hashlib
import hmac
import os
import platform
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from megatron_zpp.distributed.job_store import derived
from megatron_zpp.distributed.lifeline_connection import Closed, Connection, Message
from megatron_zpp.distributed.process_end import is_request
from megatron_zpp.distributed.topology import Topology

_TICK = 1.0  # seconds between two messages on what this rank is doing
_GRACE = 0.3  # seconds for this rank to be ended by what may have ended the other one
_CONNECT = 5.0  # seconds for one attempt
_GIVE_UP = 10.0  # seconds after all ranks were there
_PAUSE = 0.1  # seconds between two attempts


@dataclass(frozen=True)
class Root:
    """Where rank 0 listens for other nodes; 0 where there are none."""

    port: int


def parent_of(topology: Topology) -> int | None:
    """The rank to which this rank connects; None for rank 0."""
    if topology.rank == 0:
        return None
    mesh = topology.mesh()
    return 0 if topology.local_rank == 0 else mesh.ranks(*mesh.inside_node)[0]


def hello_token(token: str, rank: int) -> str:
    """What a rank's hello has, from which `token` cannot be found: nobody is believed who repeats a hello."""
    return derived(token.encode(), f"hello of rank {rank}").hex()


def children_of(topology: Topology) -> set[int]:
    """The ranks that connect to this rank."""
    if topology.local_rank:
        return set()
    mesh = topology.mesh()
    others = mesh.ranks(mesh.node) if topology.rank == 0 else ()
    return {*mesh.ranks(*mesh.inside_node), *others} - {topology.rank}


class Lifelines:
    """The connections of one rank, and a thread that reads them.

    `ended` is called, from that thread, when another rank has ended without saying so; the text is its name,
    what ended it and what it was doing. It is called at most once, and not after `leave`. `doing` returns
    what this rank is doing. Both may be replaced at any time.
    """

    def __init__(self, topology: Topology, ended: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.ended, self._say = ended, say
        self.doing: Callable[[], str] = lambda: "starting"
        self._topology = topology
        self._token = ""
        self._awaited = children_of(topology)
        self._below: set[int | None] = set()  # children below which all ranks are connected
        self._connections: list[Connection] = []
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._new: list[Connection] = []  # connected, for the thread to read
        self._suspects: list[tuple[float, str]] = []  # news that waits for its time
        self._lock = threading.Lock()
        self._silent, self._told_parent, self._present = False, False, 0.0
        _close_in_forks(self)

    def listen(self) -> Root:
        """On rank 0: listen for the first ranks of other nodes; to be followed by `start`."""
        port = 0
        if self._topology.nodes > 1:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._add_listener(
                socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
            )
            port = self._listeners[0].getsockname()[1]
        return Root(port)

    def start(self, root: Root, address: str, token: str) -> None:
        """Begin to connect, and to read; rank 0 can be reached at `address`. Returns at once.

        `token` is known to the ranks of the job alone: who does not send it is no rank.
        """
        self._token = token
        if self._topology.local_rank == 0 and self._topology.local_world_size > 1:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self._name_of_node())
            listener.listen(4096)
            self._add_listener(listener)
        threading.Thread(target=self._read, name="lifelines", daemon=True).start()
        if self._topology.rank > 0:
            connect = threading.Thread(
                target=self._connect, args=(address, root.port), name="lifeline", daemon=True
            )
            connect.start()

    def all_present(self) -> None:
        """Tell that all ranks have started: from now on a connection that cannot be made is reported."""
        self._present = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether this rank and all below it are connected; on rank 0, whether all ranks hear the news."""
        return self._below >= self._awaited

    def leave(self) -> None:
        """Say that this process ends, so that its closing is no news; hear nothing from now on."""
        with self._lock:  # the thread closes everything once this rank is silent, so not before the words
            for connection in (*self._connections, *self._new):
                if connection.rank is not None:
                    connection.send({"bye": True})
            self._silent = True
        self._wake()

    def _add_listener(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def _name_of_node(self) -> str:
        """The abstract Unix socket of the node's first rank; everyone on the host can read such names."""
        node = f"{self._token} {self._topology.mesh().node_of(self._topology.rank)}"
        return f"\0megatron_zpp/{hashlib.blake2b(node.encode(), digest_size=16).hexdigest()}"

    def _connect(self, address: str, port: int) -> None:
        """A thread of its own: connect to the parent, which may not be there yet."""
        while not self._silent:
            connection = None
            try:
                if self._topology.local_rank:
                    connection = Connection.to_unix_socket(self._name_of_node(), _CONNECT)
                else:
                    connection = Connection.to_port(address, port, _CONNECT)
                connection.send(self._hello())
                parent = parent_of(self._topology)
                assert parent is not None
                connection.await_hello(hello_token(self._token, parent), _CONNECT)
                break
            except (OSError, Closed) as error:
                if connection:
                    connection.close()
                if self._present and time.monotonic() > self._present + _GIVE_UP:
                    self._say(
                        f"warning: rank {self._topology.rank} on {platform.node()} has no connection to rank "
                        f"{parent_of(self._topology)} ({error}): it hears of a rank that is killed only "
                        "through the store, which may take --heartbeat-timeout"
                    )
                    return
            time.sleep(_PAUSE)
        else:
            return
        with self._lock:
            if self._silent:  # since the hello, which the other end has
                connection.send({"bye": True})
                connection.close()
                return
            self._new.append(connection)
        self._wake()

    def _hello(self) -> Message:
        rank = self._topology.rank
        return {"token": hello_token(self._token, rank), "rank": rank, "host": platform.node()}

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"x", socket.MSG_DONTWAIT)

    def _read(self) -> None:
        """The thread."""
        next_tick = time.monotonic() + _TICK
        while not self._silent:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK
                self._tell_all({"doing": self.doing()})
                self._drop_strangers(now)
            due = min([next_tick, *(when for when, _ in self._suspects)])
            for key, _ in self._selector.select(max(0.0, due - now)):
                if isinstance(key.data, Connection):
                    self._read_one(key.data)
                elif key.data is not None:
                    self._accept(key.data)
                else:
                    self._woken.recv(64)
            with self._lock:
                new, self._new = self._new, []
            for connection in new:
                self._add(connection)
                self._handle_messages(connection)  # which may have come with the hello
            for when, text in self._suspects:
                if time.monotonic() >= when:
                    self._tell_news(text, None)
                    break
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            self._add(Connection(listener.accept()[0]))

    def _add(self, connection: Connection) -> None:
        with self._lock:
            self._connections.append(connection)
            if connection.confirmed:
                connection.send({"bye": True} if self._silent else {"doing": self.doing()})
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        if connection.rank is not None:
            self._report_complete()

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        with self._lock:
            self._connections.remove(connection)
        connection.close()

    def _read_one(self, connection: Connection) -> None:
        try:
            connection.receive()
        except Closed as closed:
            self._drop(connection)
            if not connection.confirmed or connection.left or closed.by_network:
                self._below.discard(connection.rank)
                self._report_complete()
                return
            end = connection.process.end() if connection.process else None
            wait = _GRACE if is_request(end) else 0.0
            self._suspects.append((time.monotonic() + wait, connection.describe(end)))
            return
        self._handle_messages(connection)

    def _handle_messages(self, connection: Connection) -> None:
        """Act on the whole messages that have come."""
        for message in connection.messages():
            if connection.rank is None:
                if not self._is_awaited(message):
                    self._drop(connection)
                    return
                with self._lock:
                    connection.greet(message)
                    connection.send(self._hello())
                    if self._silent:
                        connection.send({"bye": True})
            elif text := message.get("ended"):
                self._tell_news(text, connection)
            elif "complete" in message:
                (self._below.add if message["complete"] else self._below.discard)(connection.rank)
                self._report_complete()

    def _is_awaited(self, hello: Message) -> bool:
        """Whether a hello is that of a child of this rank which is not connected yet."""
        connected = {connection.rank for connection in self._connections}
        token, rank = str(hello.get("token")).encode(errors="replace"), hello.get("rank")
        if not isinstance(rank, int) or rank not in self._awaited - connected:
            return False
        return hmac.compare_digest(token, hello_token(self._token, rank).encode())

    def _drop_strangers(self, now: float) -> None:
        """Close connections that have sent no hello."""
        for connection in list(self._connections):
            if connection.rank is None and now > connection.since + _CONNECT:
                self._drop(connection)

    def _report_complete(self) -> None:
        """Tell the parent whether all ranks below this one are connected, if that is new."""
        parent, complete = parent_of(self._topology), self.complete
        for connection in self._connections:
            if parent is not None and connection.rank == parent and complete != self._told_parent:
                self._told_parent = complete
                with self._lock:
                    connection.send({"complete": complete})

    def _tell_all(self, message: Message, but: Connection | None = None) -> None:
        with self._lock:
            for connection in self._connections:
                if connection is not but and connection.rank is not None:
                    connection.send(message)

    def _tell_news(self, text: str, source: Connection | None) -> None:
        """Pass on that a rank has ended, and act on it, unless this rank is ending itself."""
        if self._silent:
            return
        self._tell_all({"ended": text}, but=source)
        self._silent = True
        self.ended(text)

    def close(self) -> None:
        """Close everything, without a word."""
        self._selector.close()
        for connection in (*self._connections, *self._new):
            connection.close()
        for each in (*self._listeners, self._waker, self._woken):
            each.close()


def _close_in_forks(lifelines: Lifelines) -> None:
    """Let a forked child of this process, such as a data loader's worker, hold none of its connections."""
    reference = weakref.ref(lifelines)

    def close() -> None:
        if there := reference():
            there.close()

    os.register_at_fork(after_in_child=close)
