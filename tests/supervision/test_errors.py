"""The line of a rank that fails when its store does not answer."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision import errors
from megatron_zpp.supervision.once_per_node import OncePerNode
from tests.forkserver import CONTEXT


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(1000)


def test_a_stopped_store_keeps_no_rank_from_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_ANSWER", 0.5)
    pipe, end = CONTEXT.Pipe()
    host = CONTEXT.Process(target=serve, args=(end,))
    host.start()
    try:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), wait_for_workers=False)
        say = errors.said_once(store, Topology(1, 2, 0, 1), OncePerNode("job node 1", tmp_path))
        say("first", "line 1")
        os.kill(host.pid, signal.SIGSTOP)
        started = time.monotonic()
        say("second", "line 2")
        assert time.monotonic() - started < 60
        assert capfd.readouterr().err.splitlines()[-2:] == ["line 1", "line 2"]
    finally:
        host.kill()
        host.join()
