"""The link that campaigns disturb: ranks train across it, and a delayed one delays them."""

import os
import socket
import time
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

from benchmarks.faults.network import DELAYED, DELAYED_BY, Link
from benchmarks.faults.settings import MOCK, SHAPE
from tests.forkserver import CONTEXT
from tests.support import Run


def join(link: Link, node: int) -> None:
    """Move this rank to a node, as `Disturbances` does."""
    link.enter(node)
    os.environ.update(MASTER_ADDR=link.address(0), GLOO_SOCKET_IFNAME=Link.INTERFACE)


def test_ranks_train_across_the_link(link: Link, tmp_path: Path) -> None:
    flags = f"{SHAPE} {MOCK} --train-iters 2 --global-batch-size 8 --zero-stage 3 --eval-iters 0".split()
    with Run(tmp_path, 2) as run:
        for rank in range(2):
            place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            run.start(rank, *flags, change=partial(join, link, rank), **place)
        assert run.statuses() == {0: 0, 1: 0}, run.err(0)
        assert "iteration        2/" in run.out(0)


def echo(link: Link, pipe: Pipe) -> None:
    link.enter(0)
    with socket.create_server((link.address(0), 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        while content := connection.recv(1):
            connection.sendall(content)


def ask(link: Link, port: int, pipe: Pipe) -> None:
    """Tell how long one byte takes there and back, whenever asked."""
    link.enter(1)
    with socket.create_connection((link.address(0), port)) as connection:
        while True:
            pipe.recv()
            began = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            pipe.send(time.monotonic() - began)


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs /dev/net/tun")
def test_a_delayed_link_keeps_connections_and_delays_each_byte(link: Link) -> None:
    (port, told), (pipe, end) = CONTEXT.Pipe(), CONTEXT.Pipe()
    processes = [CONTEXT.Process(target=echo, args=(link, told))]
    processes[0].start()
    processes.append(CONTEXT.Process(target=ask, args=(link, port.recv(), end)))
    processes[1].start()

    def seconds() -> float:
        pipe.send("")
        return pipe.recv()

    try:
        assert min(seconds() for _ in range(5)) < DELAYED_BY
        link.fail(DELAYED, 0)
        assert min(seconds() for _ in range(3)) >= 2 * DELAYED_BY
        link.mend()
        assert min(seconds() for _ in range(5)) < DELAYED_BY
    finally:
        for process in processes:
            process.kill()
            process.join()
