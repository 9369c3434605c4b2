"""Lifelines of real processes, of which some are killed, stopped or leave.

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
from megatron_zpp.distributed.lifelines import Lifelines, hello_token
from megatron_zpp.distributed.topology import Topology
from tests.forkserver import CONTEXT
from tests.support import free_port, wait_until

NAME, TOKEN = platform.node(), "what the ranks of the job alone know"
WORLD = 4


def lifelines_of(rank: int, world: int, heard: Callable[[str], object] = lambda text: None) -> Lifelines:
    """Those of a rank."""
    return Lifelines(Topology(rank, world, rank, world), heard)


def rank_main(directory: str, rank: int, pipe: Pipe, prepare: Callable[[], None] | None, slow: bool) -> None:
    """Obeys the texts that come through the pipe, and answers with what they ask for."""
    if prepare:
        prepare()
    place = Path(directory) / str(rank)

    def ended(text: str) -> None:
        place.with_suffix(".partial").write_text(text)
        place.with_suffix(".partial").rename(place.with_suffix(".heard"))
        os._exit(1)

    lines = lifelines_of(rank, WORLD, ended)
    if rank == 0:
        pipe.send(lines.listen())
    lines.start(pipe.recv(), "127.0.0.1", TOKEN)
    if slow:
        pipe.send("listens")
    lines.all_present()
    beating = threading.Thread(target=beat, args=(lines, {"doing": f"step {rank}"}), daemon=True)
    beating.start()
    while True:
        match pipe.recv():
            case "complete":
                pipe.send(lines.complete)
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


def beat(lines: Lifelines, message: dict[str, str]) -> None:
    """Send it again and again."""
    while True:
        lines.beat(message)
        time.sleep(0.1)


class Ranks:
    """Processes that have lifelines, without those that are `absent`.

    Rank 0 is stopped as soon as it listens if it is `slow`.
    """

    def __init__(
        self, directory: Path, prepare: Callable[[], None] | None, absent: Sequence[int], slow: bool
    ) -> None:
        self.directory = directory
        self.pipes: dict[int, Pipe] = {}
        self.processes: dict[int, BaseProcess] = {}
        for rank in sorted(set(range(WORLD)) - set(absent)):
            self.pipes[rank], end = CONTEXT.Pipe()
            given = (str(directory), rank, end, prepare, slow and rank == 0)
            self.processes[rank] = CONTEXT.Process(target=rank_main, args=given)
            self.processes[rank].start()
        self.port = self.pipes[0].recv()
        for rank, pipe in self.pipes.items():
            pipe.send(self.port)
            if slow and rank == 0:
                pipe.recv()
                self.send(0, signal.SIGSTOP)

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
    prepare: Callable[[], None] | None = None,
    absent: Sequence[int] = (),
    *,
    slow: bool = False,
) -> Iterator[Ranks]:
    started = Ranks(directory, prepare, absent, slow)
    try:
        if not (absent or slow):
            started.wait_until_complete()
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.join()


def killed(run: Ranks, victim: int) -> None:
    """Kill a rank: the others hear what it was doing last."""
    run.send(victim, signal.SIGKILL)
    end = f"rank {victim} [{NAME}] has ended without a word: killed, or crashed; last seen: step {victim}"
    assert run.heard(sorted(set(range(WORLD)) - {victim})) == [end] * (WORLD - 1)


def test_a_worker_that_outlives_its_rank_holds_no_connection(tmp_path: Path) -> None:
    """It is killed with the rank's pipe: the end of file tells it nothing."""
    with ranks(tmp_path) as run:
        time.sleep(0.5)  # heartbeats
        assert run.ask(2, "fork") == "forked"
        pid = run.processes[2].pid
        (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        killed(run, 2)
        os.kill(int(worker), signal.SIGKILL)  # is still there


def test_who_leaves_is_not_missed_and_hears_nothing(tmp_path: Path) -> None:
    """The others go on, and hear of the next kill."""
    with ranks(tmp_path) as run:
        for rank in (3, 2):
            assert run.ask(rank, "leave") == "left"
        run.pipes[3].send(1)
        run.processes[3].join()
        time.sleep(2 * module._GRACE)
        assert run.nobody_heard()
        run.send(1, signal.SIGKILL)
        run.heard([0])
        assert not (tmp_path / "2.heard").exists()
        assert run.processes[2].is_alive()


def test_a_rank_that_leaves_says_so_before_its_connection_closes() -> None:
    """Also if it has only just connected, and rank 0 reads nothing meanwhile."""
    heard: list[str] = []
    parent, child = lifelines_of(0, 2, heard.append), lifelines_of(1, 2)
    port = parent.listen()
    for lines in (parent, child):
        lines.start(port, "127.0.0.1", TOKEN)
    wait_until(lambda: child._connections)
    (connection,) = parent._connections
    child.leave()
    wait_until(lambda: not parent._connections)
    assert connection.left
    time.sleep(2 * module._GRACE)
    assert heard == []
    parent.leave()


def test_a_stopped_rank_has_not_ended(tmp_path: Path) -> None:
    """Nobody hears anything, and its connections carry news again afterwards."""
    with ranks(tmp_path) as run:
        for rank in (0, 3):
            run.send(rank, signal.SIGSTOP)
        time.sleep(2 * module._TICK + module._GRACE)
        assert run.nobody_heard()
        for rank in (0, 3):
            run.send(rank, signal.SIGCONT)
        killed(run, 1)


def test_ranks_that_get_the_same_request_do_not_report_each_other(tmp_path: Path) -> None:
    """As in Ctrl-C before the ranks have joined: the default action ends each of them."""
    with ranks(tmp_path) as run:
        for rank in range(WORLD):
            run.send(rank, signal.SIGTERM)
        for process in run.processes.values():
            process.join()
        assert {process.exitcode for process in run.processes.values()} == {-signal.SIGTERM}


def test_strangers_are_turned_away(tmp_path: Path) -> None:
    with ranks(tmp_path, absent=[3]) as run:
        hello = {"token": "0" * 32, "rank": 3, "host": "elsewhere"}  # of the rank that is awaited
        sent = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 70_000,
            b"[" * 60_000 + b"\n",
            json.dumps(hello).encode() + b"\n",
        ]
        wait_until(lambda: run.ask(0, "connected") >= {1, 2})  # no stranger may come before them
        for rank in (0, 2, 17, "x", [3]):
            sent.append(json.dumps(hello | {"rank": rank}).encode() + b"\n")
        sent.append(json.dumps(hello | {"token": "\ud800"}).encode() + b"\n")
        for rank in (0, 2, 17):  # a rank that is connected, and no ranks
            known = {"rank": rank, "token": hello_token(TOKEN, rank)}
            sent.append(json.dumps(hello | known).encode() + b"\n")
        for text in sent:
            with socket.create_connection(("127.0.0.1", run.port)) as stranger:
                stranger.sendall(text)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(60)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        time.sleep(2 * module._GRACE)
        assert run.nobody_heard()
        assert run.ask(0, "complete") is False
        run.send(1, signal.SIGKILL)
        run.heard([0, 2])


def test_who_repeats_the_hello_of_a_rank_is_not_its_parent() -> None:
    """At a port of an earlier start, which a stranger has taken and named again."""
    heard: list[str] = []
    lines = lifelines_of(1, 2, heard.append)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(60)
        lines.start(stranger.getsockname()[1], "127.0.0.1", TOKEN)
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
    """Ranks that wait for rank 0's hello try again and again, and rank 0 reads all of that later."""
    with ranks(tmp_path, wait_briefly, slow=True) as run:
        time.sleep(1.5)
        run.send(0, signal.SIGCONT)
        run.wait_until_complete()
        time.sleep(2 * module._GRACE)
        assert run.nobody_heard()
        run.send(3, signal.SIGKILL)
        run.heard([0, 1, 2])


def test_a_rank_that_cannot_connect_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GIVE_UP", 0.0)
    heard: list[str] = []
    lines, port = lifelines_of(1, 2, heard.append), free_port()
    lines.start(port, "127.0.0.1", TOKEN)
    lines.all_present()
    wait_until(lambda: heard)
    problem = f"rank 1 on {NAME} cannot connect to rank 0 at port {port} ([Errno 111] Connection refused)"
    assert heard == [f"MASTER_ADDR 127.0.0.1: {problem}; let nodes reach each other at all ports"]
    assert not lines.complete
