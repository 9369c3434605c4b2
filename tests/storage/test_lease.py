"""One holder of a directory: alive, dead, on another host, and two that come at once."""

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.storage import lease as module
from megatron_zpp.storage.lease import LEASE, Held, Holder, Lease, LeaseLost
from tests.support import ROOT, ended, environment, nightly, wait_until

SECONDS = 0.6
HOLD = """
import sys, time
from pathlib import Path
from megatron_zpp.storage.lease import Lease
with Lease(Path(sys.argv[1]), print, 30.0):
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def elsewhere(directory: Path, **changes: Any) -> Path:
    """Makes the lease in `directory` one of another host."""
    return change(directory / LEASE, host="far", boot="other", **changes)


def change(path: Path, **changes: Any) -> Path:
    """Writes the lease with other values."""
    holder = Holder.decode(path.read_bytes())
    assert holder
    path.write_bytes(replace(holder, **changes).encode())
    return path


def test_it_is_given_back(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "deep"
    with Lease(directory, print) as lease:
        lease.check()
        assert [path.name for path in directory.iterdir()] == [LEASE]
    assert not directory.exists()  # nothing was saved
    directory.mkdir()
    with Lease(directory, print):
        (directory / "iter_0000001").mkdir()
    assert [path.name for path in directory.iterdir()] == ["iter_0000001"]


def test_an_error_of_close_when_it_is_given_back_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, raised = os.close, []

    def full(descriptor: int) -> None:  # as network file systems do, where the quota is used up
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(threading, "excepthook", raised.append)
    with Lease(tmp_path, print):
        monkeypatch.setattr(os, "close", full)
    monkeypatch.undo()
    assert not raised


def test_a_live_process_of_this_host_is_named_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        started = time.monotonic()
        with pytest.raises(Held, match=rf"process {process.pid} on .*, started 20\d\d-"):
            Lease(tmp_path, print)
        os.kill(process.pid, signal.SIGSTOP)  # it may continue at any time
        with pytest.raises(Held):
            Lease(tmp_path, print)
        assert time.monotonic() - started < 20


def test_a_killed_process_of_this_host_blocks_nobody(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()  # and not waited for: a zombie
        wait_until(lambda: ended(process.pid))
        said: list[str] = []
        with Lease(tmp_path, said.append):
            pass
        assert said == []


def test_a_process_number_that_was_given_again_is_no_holder(tmp_path: Path) -> None:
    lease = Lease(tmp_path, print)
    path = change(tmp_path / LEASE, lease="x", process_started=1)
    with Lease(tmp_path, print):
        with pytest.raises(LeaseLost):
            lease.check()
        lease.__exit__()
        assert path.exists()  # it was not the first one's to remove


def test_no_damage_names_another_holder() -> None:
    """A flipped bit could name a process that is dead, and two runs would save at once."""
    content = Holder.of_this_process().encode()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        assert Holder.decode(bytes(changed)) in (None, Holder.decode(content)), bit
    for length in range(len(content) - 1):
        assert Holder.decode(content[:length]) is None


def test_damage_is_no_end_of_a_live_holder(tmp_path: Path) -> None:
    with Lease(tmp_path, print, SECONDS) as lease:
        path = tmp_path / LEASE
        path.write_bytes(path.read_bytes().replace(b'"process": ', b'"process": 9'))
        with pytest.raises(Held, match=f"process {os.getpid()} on "):
            Lease(tmp_path, print, 5.0)
        lease.check()


def test_a_host_that_is_gone_is_waited_for_once(tmp_path: Path) -> None:
    Lease(tmp_path, print)
    elsewhere(tmp_path, lease="x")
    said: list[str] = []
    started = time.monotonic()
    with Lease(tmp_path, said.append, SECONDS):
        assert SECONDS <= time.monotonic() - started < SECONDS + 5
    assert len(said) == 1
    assert "on far, started" in said[0]


def test_a_host_that_renews_is_refused(tmp_path: Path) -> None:
    with Lease(tmp_path, print, SECONDS):
        path = elsewhere(tmp_path, lease="x", renewed=1)
        with ThreadPoolExecutor(1) as other:
            taking = other.submit(Lease, tmp_path, print, 5.0)
            for renewed in itertools.count(2):
                if taking.done():
                    break
                elsewhere(tmp_path, renewed=renewed)
                time.sleep(0.1)
            with pytest.raises(Held, match="on far"):
                taking.result()
        assert json.loads(path.read_text())["lease"] == "x"


def test_a_holder_renews_and_finds_out_that_it_was_taken_over(tmp_path: Path) -> None:
    with Lease(tmp_path, print, SECONDS) as lease:
        first = (tmp_path / LEASE).read_text()
        wait_until(lambda: (tmp_path / LEASE).read_text() != first)
        later = (tmp_path / LEASE).read_text()
        assert len(later) == len(first)
        other = tmp_path / "other"
        other.write_text(later)
        change(other, lease="0" * 16)
        os.replace(other, tmp_path / LEASE)
        wait_until(lambda: lease.lost)
        with pytest.raises(LeaseLost, match=r"was taken over by process \d+ on "):
            lease.check()
        assert "0" * 16 in (tmp_path / LEASE).read_text()
    assert (tmp_path / LEASE).exists()


def test_a_holder_finds_out_that_another_run_has_come_and_gone(tmp_path: Path) -> None:
    """Suspended for longer than a host is waited for, it must not save over what the other run has saved."""
    with Lease(tmp_path, print, 30.0) as lease:
        elsewhere(tmp_path, lease="x")
        with Lease(tmp_path, print, SECONDS):
            pass
        assert not (tmp_path / LEASE).exists()
        with pytest.raises(LeaseLost, match="was removed; another run may have used the directory since"):
            lease.check()
        assert lease.lost


def take(directory: Path, barrier: Any, results: Any, over: Any) -> None:
    barrier.wait()
    try:
        with Lease(directory, print, SECONDS):
            results.put("held")
            over.wait()
    except Held:
        results.put("refused")


@pytest.mark.parametrize("stale", [None, nightly("killed elsewhere"), "cut off"])
def test_of_several_that_come_at_once_one_has_it(tmp_path: Path, stale: str | None) -> None:
    if stale:
        lease = Lease(tmp_path, print)
        lease._over.set()
        elsewhere(tmp_path, lease="x")
        if stale == "cut off":
            (tmp_path / LEASE).write_text("")
    context, count = multiprocessing.get_context("fork"), 4
    barrier, results, over = context.Barrier(count), context.SimpleQueue(), context.Event()
    given = (tmp_path, barrier, results, over)
    processes = [context.Process(target=take, args=given) for _ in range(count)]
    for process in processes:
        process.start()
    outcomes = sorted(results.get() for _ in processes)
    over.set()
    for process in processes:
        process.join()
    assert outcomes == ["held"] + ["refused"] * (count - 1)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        Lease(tmp_path / "file" / "below", print)


def test_storage_that_does_not_answer_keeps_nobody_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal is in a system call that does not return."""
    monkeypatch.setattr(module, "SECONDS", 0.2)
    stuck, over = threading.Event(), threading.Event()
    with Lease(tmp_path, print, SECONDS) as lease:

        def renew(content: bytes) -> None:
            stuck.set()
            over.wait(60)

        lease._record.renew = renew
        assert stuck.wait(60)
        started = time.monotonic()
    assert time.monotonic() - started < 30
    over.set()
    lease._thread.join()
