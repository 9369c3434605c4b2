"""Lifelines of real processes, on emulated nodes of one machine, of which some are killed, stopped or leave.

A rank that hears of an end writes the line to a file and ends. Waits have no bound that a busy machine could
exceed: other ways by which a rank could hear do not exist here.
"""

import json
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from megatron_zpp.distributed import lifelines as module
from megatron_zpp.distributed.lifelines import Lifelines, Root, children_of, hello_token, parent_of
from megatron_zpp.distributed.process_end import OtherProcess, is_request
from megatron_zpp.distributed.topology import Topology
from tests.forkserver import CONTEXT
from tests.support import wait_until

NAME, TOKEN = platform.node(), "what the ranks of the job alone know"


def rank_main(
    directory: str, topology: Topology, pipe: Pipe, prepare: Callable[[], None] | None, slow: bool
) -> None:
    """Obeys the texts that come through the pipe, and answers with what they ask for."""
    rank = topology.rank
    if prepare:
        prepare()
    place = Path(directory) / str(rank)

    def ended(text: str) -> None:
        place.with_suffix(".partial").write_text(text)
        place.with_suffix(".partial").rename(place.with_suffix(".heard"))
        os._exit(1)

    lines = Lifelines(topology, ended, place.with_suffix(".said").write_text)
    lines.doing = lambda: f"step {rank}"
    if rank == 0:
        pipe.send(vars(lines.listen()))
    lines.start(Root(**pipe.recv()), "127.0.0.1", TOKEN)
    if slow:
        pipe.send("listens")
    lines.all_present()
    while True:
        match pipe.recv():
            case "complete":
                pipe.send(lines.complete)
            case "below":
                pipe.send(set(lines._below))
            case "connected":
                pipe.send({connection.rank for connection in lines._connections})
            case "leave":
                lines.leave()
                pipe.send("left")
            case "fork":  # as a data loader's worker, which outlives its rank
                if not os.fork():
                    time.sleep(60)
                    os._exit(0)
                pipe.send("forked")
            case status:
                os._exit(status)


class Ranks:
    """Processes that have lifelines: nodes of `node` ranks each, without those that are `absent`.

    Ranks that are `slow` are stopped as soon as they listen.
    """

    def __init__(
        self,
        directory: Path,
        prepare: dict[int, Callable[[], None]],
        absent: Sequence[int],
        slow: Sequence[int],
        world: int,
        node: int,
    ) -> None:
        self.directory = directory
        self.pipes: dict[int, Pipe] = {}
        self.processes: dict[int, BaseProcess] = {}
        for rank in sorted(set(range(world)) - set(absent)):
            self.pipes[rank], end = CONTEXT.Pipe()
            topology = Topology(rank, world, rank % node, node)
            given = (str(directory), topology, end, prepare.get(rank), rank in slow)
            self.processes[rank] = CONTEXT.Process(target=rank_main, args=given)
            self.processes[rank].start()
        self.root = self.pipes[0].recv()
        for rank in sorted(self.pipes, key=lambda rank: rank not in slow):
            self.pipes[rank].send(self.root)
            if rank in slow:
                self.pipes[rank].recv()
                self.send(rank, signal.SIGSTOP)

    def ask(self, rank: int, text: object) -> object:
        self.pipes[rank].send(text)
        return self.pipes[rank].recv()

    def wait_until_complete(self) -> None:
        wait_until(lambda: self.ask(0, "complete"))

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def heard(self, ranks: Sequence[int]) -> list[str]:
        """What these ranks hear, all of them."""
        files = [self.directory / f"{rank}.heard" for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files))
        return [file.read_text() for file in files]

    def nobody_heard(self) -> bool:
        return not list(self.directory.glob("*.heard"))


@contextmanager
def ranks(
    directory: Path,
    prepare: dict[int, Callable[[], None]] | None = None,
    absent: Sequence[int] = (),
    slow: Sequence[int] = (),
    *,
    world: int = 6,
    node: int = 3,
) -> Iterator[Ranks]:
    started = Ranks(directory, prepare or {}, absent, slow, world, node)
    try:
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.join()


def test_the_tree_has_one_edge_per_rank_and_no_rank_has_many() -> None:
    """1,024 ranks on 128 nodes: rank 0 has a connection per node and per rank of its own."""
    tree = [Topology(rank, 1024, rank % 8, 8) for rank in range(1024)]
    edges = {(parent_of(one), one.rank) for one in tree if one.rank}
    assert edges == {(one.rank, child) for one in tree for child in children_of(one)}
    assert len(edges) == 1023
    assert len(children_of(tree[0])) == 127 + 7
    assert max(len(children_of(one)) for one in tree[1:]) == 7


KILLS = {"root": (0, 6, 3), "first of node 1": (3, 6, 3), "leaf": (4, 6, 3), "one rank per node": (2, 3, 1)}


PROMPT = 2  # seconds, whereas heartbeats take four at the least
TRIES = 3  # other programs may delay some kills


def seconds_to_hear(victim: int, world: int, node: int, directory: Path) -> float:
    """Seconds from a kill until all other ranks have heard what they should."""
    directory.mkdir()
    with ranks(directory, world=world, node=node) as run:
        run.wait_until_complete()
        begin = time.monotonic()
        run.send(victim, signal.SIGKILL)
        texts = run.heard(sorted(set(range(world)) - {victim}))
        seconds = time.monotonic() - begin
    for text in texts:
        assert text.startswith(f"rank {victim} [{NAME}] ")
        assert text.endswith(f"; last seen: step {victim}") or text.endswith("; last seen: starting")
        assert " was killed by SIGKILL; " in text or " has ended without a word: killed, or " in text
    return seconds


@pytest.mark.parametrize(("victim", "world", "node"), KILLS.values(), ids=KILLS)
def test_every_rank_hears_of_a_killed_one_at_once(victim: int, world: int, node: int, tmp_path: Path) -> None:
    tries = (seconds_to_hear(victim, world, node, tmp_path / str(number)) for number in range(TRIES))
    assert any(seconds < PROMPT for seconds in tries)


def test_a_status_is_told(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        run.wait_until_complete()
        run.pipes[2].send(7)
        known = f"rank 2 [{NAME}] has ended with status 7; last seen: "
        reaped = f"rank 2 [{NAME}] has ended without a word: killed, or crashed; last seen: "
        assert all(text.startswith((known, reaped)) for text in run.heard([0, 1, 3, 4, 5]))


def test_a_worker_that_outlives_its_rank_holds_no_connection(tmp_path: Path) -> None:
    """It is killed with the rank's pipe: the end of file tells it nothing."""
    with ranks(tmp_path) as run:
        run.wait_until_complete()
        assert run.ask(4, "fork") == "forked"
        (worker,) = (
            Path(f"/proc/{run.processes[4].pid}/task/{run.processes[4].pid}/children").read_text().split()
        )
        run.send(4, signal.SIGKILL)
        run.heard([0, 1, 2, 3, 5])
        os.kill(int(worker), signal.SIGKILL)  # is still there


def test_who_leaves_is_not_missed_and_hears_nothing(tmp_path: Path) -> None:
    """Leaves of the tree, then inner ranks; the others go on, and hear of the next kill."""
    with ranks(tmp_path) as run:
        run.wait_until_complete()
        for rank in (5, 2):
            assert run.ask(rank, "leave") == "left"
        run.pipes[5].send(1)
        run.processes[5].join()
        time.sleep(2 * module._GRACE)
        assert run.nobody_heard()
        run.send(4, signal.SIGKILL)
        run.heard([0, 1, 3])
        assert not (tmp_path / "2.heard").exists()
        assert run.processes[2].is_alive()


def test_an_orderly_end_of_all_is_silent(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        run.wait_until_complete()
        for rank in reversed(range(6)):
            assert run.ask(rank, "leave") == "left"
            run.pipes[rank].send(75)
        for process in run.processes.values():
            process.join()
        assert run.nobody_heard()
        assert {process.exitcode for process in run.processes.values()} == {75}


def test_a_rank_that_leaves_says_so_before_its_connections_close() -> None:
    """Also if the thread that closes them is in the middle of a round."""
    parent, child = (Lifelines(Topology(rank, 2, rank, 2), ignore, ignore) for rank in range(2))
    root = parent.listen()
    for lines in (parent, child):
        lines.start(root, "", TOKEN)
    wait_until(lambda: parent.complete)
    (connection,) = parent._connections
    leaving = threading.Thread(target=child.leave)
    with child._lock:
        child._wake()  # the reading thread queues for the lock first, so it gets the lock first
        time.sleep(0.1)
        leaving.start()
        time.sleep(0.1)
    leaving.join()
    wait_until(lambda: not parent._connections)
    assert connection.left
    parent.leave()


def ignore(text: str) -> None:
    """What a rank hears or says."""


def test_a_stopped_rank_has_not_ended(tmp_path: Path) -> None:
    """Nobody hears anything, and its connections carry news again afterwards."""
    with ranks(tmp_path) as run:
        run.wait_until_complete()
        for rank in (3, 4):
            run.send(rank, signal.SIGSTOP)
        time.sleep(2 * module._TICK + module._GRACE)
        assert run.nobody_heard()
        for rank in (3, 4):
            run.send(rank, signal.SIGCONT)
        run.send(1, signal.SIGKILL)
        run.heard([0, 2, 3, 4, 5])


def test_ranks_that_get_the_same_request_do_not_report_each_other(tmp_path: Path) -> None:
    """As in Ctrl-C before the ranks have joined: the default action ends each of them."""
    with ranks(tmp_path) as run:
        run.wait_until_complete()
        for rank in range(6):
            run.send(rank, signal.SIGTERM)
        for process in run.processes.values():
            process.join()
        assert {process.exitcode for process in run.processes.values()} == {-signal.SIGTERM}


def test_an_end_that_may_be_a_request_waits_for_this_ranks_own() -> None:
    assert all(map(is_request, (None, "SIGTERM", "SIGINT", "status 130")))
    assert not any(map(is_request, ("SIGKILL", "SIGSEGV", "SIGABRT", "status 1")))


def test_strangers_are_turned_away(tmp_path: Path) -> None:
    with ranks(tmp_path, absent=[4]) as run:
        hello = {"token": "0" * 32, "rank": 3, "host": "elsewhere"}
        sent = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 70_000,
            b"[" * 60_000 + b"\n",
            json.dumps(hello).encode() + b"\n",
        ]
        hello |= {"token": hello_token(TOKEN, 3)}  # a child that is connected, and others' children
        wait_until(lambda: run.ask(0, "connected") >= {1, 2, 3})  # no stranger may come before them
        sent += [json.dumps(hello | {"rank": rank}).encode() + b"\n" for rank in (5, 17, "x", [3])]
        sent.append(json.dumps(hello | {"rank": 4, "token": "\ud800"}).encode() + b"\n")
        for rank in (3, 5, 17):
            sent.append(
                json.dumps(hello | {"rank": rank, "token": hello_token(TOKEN, rank)}).encode() + b"\n"
            )
        for text in sent:
            with socket.create_connection(("127.0.0.1", run.root["port"])) as stranger:
                stranger.sendall(text)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(60)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        time.sleep(2 * module._GRACE)
        assert run.nobody_heard()
        assert run.ask(0, "complete") is False
        run.send(1, signal.SIGKILL)
        run.heard([0, 2, 3, 5])


def test_who_repeats_the_hello_of_a_rank_is_not_its_parent() -> None:
    """At a port of an earlier start, which a stranger has taken and named again."""
    heard: list[str] = []
    lines = Lifelines(Topology(1, 2, 0, 1), heard.append, heard.append)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(60)
        lines.start(Root(stranger.getsockname()[1]), "127.0.0.1", TOKEN)
        for rank in (0, 1):
            connected, _ = stranger.accept()
            with connected, connected.makefile("rb") as words:
                connected.settimeout(60)
                hello = json.loads(words.readline()) | {"rank": rank}
                for message in (hello, {"ended": "call 555-0100"}):
                    connected.sendall(json.dumps(message).encode() + b"\n")
                with suppress(ConnectionResetError):  # what it had not read is lost
                    assert words.readline() == b""  # it turns away from a stranger
    lines.leave()
    assert heard == []


def wait_briefly() -> None:
    module._CONNECT = 0.2


def test_a_slow_start_is_no_end(tmp_path: Path) -> None:
    """Ranks that wait for the others' hello try again and again, and the others read all of that later."""
    with ranks(tmp_path, dict.fromkeys(range(6), wait_briefly), slow=(0, 3)) as run:
        time.sleep(1.5)
        for rank in (0, 3):
            run.send(rank, signal.SIGCONT)
        run.wait_until_complete()
        time.sleep(2 * module._GRACE)
        assert run.nobody_heard()
        run.send(5, signal.SIGKILL)
        run.heard(range(5))


def give_up_soon() -> None:
    module._GIVE_UP = 0.0


def test_a_connection_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    """The first rank of node 1 is missing: its ranks say so, and the others are as well off as before."""
    with ranks(tmp_path, {4: give_up_soon, 5: give_up_soon}, absent=[3]) as run:
        for rank in (4, 5):
            said = tmp_path / f"{rank}.said"
            wait_until(lambda said=said: said.exists() and said.read_text())
            assert said.read_text().startswith(
                f"warning: rank {rank} on {NAME} has no connection to rank 3 ([Errno 111] Connection refused)"
            )
        wait_until(lambda: run.ask(0, "below") == {1, 2})  # a rank that is not connected yet is not missed
        assert run.ask(0, "complete") is False
        run.send(2, signal.SIGKILL)
        run.heard([0, 1])


def test_the_end_of_a_process_is_known_until_its_parent_asks() -> None:
    pair = socket.socketpair()
    this = OtherProcess.at_other_end(pair[0])
    assert this is not None
    assert this.pid == os.getpid()
    assert this.end() is None
    for end in ("status 9", "SIGKILL", f"SIG{signal.SIGRTMIN + 6}"):  # real-time signals have no names
        pid = os.fork()
        if not pid:
            if end == "status 9":
                os._exit(9)
            time.sleep(60)
        if end != "status 9":
            os.kill(pid, signal.SIGKILL if end == "SIGKILL" else signal.SIGRTMIN + 6)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert OtherProcess(pid, started).end() == end
        assert OtherProcess(pid, "1").end() is None  # another process of that id
        os.waitpid(pid, 0)
        assert OtherProcess(pid, started).end() is None
