"""One holder of a directory of files or objects: alive, dead, on another host, and two that come at once."""

import contextlib
import errno
import itertools
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
from megatron_zpp.storage.files import write_whole
from megatron_zpp.storage.lease import LEASE, Held, Holder, Lease, LeaseLost
from megatron_zpp.storage.location import Location, location
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.objects import path as object_path
from tests.object_server import BUCKET, ObjectServer
from tests.support import ROOT, ended, environment, flipped, nightly, wait_until

SECONDS = 0.6
HOLD = """
import sys, time
from pathlib import Path
from megatron_zpp.storage.lease import Lease
with Lease(Path(sys.argv[1]), print, 30.0):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["file", "object"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "file":
        return tmp_path
    request.getfixturevalue("server")
    return location(f"s3://{BUCKET}/{tmp_path.name}")


@contextlib.contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def content_of(directory: Location) -> bytes:
    path = directory / LEASE
    return path.read_bytes() if isinstance(path, Path) else path.read_whole()[0]


def held_by(directory: Location) -> Holder:
    """Whom the lease names."""
    holder = Holder.decode(content_of(directory))
    assert holder
    return holder


def change(directory: Location, **changes: Any) -> None:
    """Replace the lease by one with other values; whoever held it renews a file without a name."""
    write_whole(directory / LEASE, replace(held_by(directory), **changes).encode())


def elsewhere(directory: Location, **changes: Any) -> None:
    """Make the lease one of another host."""
    change(directory, host="far", boot="other", **changes)


def test_it_is_renewed_and_given_back(directory: Location) -> None:
    with Lease(directory, print, SECONDS) as lease:
        first = content_of(directory)
        wait_until(lambda: held_by(directory).renewed > 1)
        assert len(content_of(directory)) == len(first)
        lease.check()
        with pytest.raises(Held, match=r"process \d+ on .*, started 20\d\d-"):
            Lease(directory, print, SECONDS)
    assert not (directory / LEASE).exists()


def test_a_directory_that_was_made_for_it_goes_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "deep"
    with Lease(directory, print):
        assert [path.name for path in directory.iterdir()] == [LEASE]
    assert not directory.exists()  # nothing was saved
    directory.mkdir()
    with Lease(directory, print):
        (directory / "iter_0000001").mkdir()
    assert [path.name for path in directory.iterdir()] == ["iter_0000001"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        Lease(tmp_path / "file" / "below", print)


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


def test_a_process_of_this_host_is_named_at_once_while_it_lives(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        started = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)  # it may continue at any time
        with pytest.raises(Held, match=rf"process {process.pid} on .*, started 20\d\d-"):
            Lease(tmp_path, print)
        assert time.monotonic() - started < 20
        process.kill()  # and not waited for: a zombie
        wait_until(lambda: ended(process.pid))
        said: list[str] = []
        with Lease(tmp_path, said.append):
            pass
        assert said == []


def test_a_process_number_that_was_given_again_is_no_holder(tmp_path: Path) -> None:
    lease = Lease(tmp_path, print)
    change(tmp_path, lease="x", process_started=1)
    with Lease(tmp_path, print):
        with pytest.raises(LeaseLost):
            lease.check()
        lease.__exit__()
        assert (tmp_path / LEASE).exists()  # it was not the first one's to remove


def test_no_damage_names_another_holder() -> None:
    """A flipped bit could name a process that is dead, and two runs would save at once."""
    content = Holder.of_this_process().encode()
    for bit in range(8 * len(content)):
        assert Holder.decode(flipped(content, bit)) in (None, Holder.decode(content)), bit
    for length in range(len(content) - 1):
        assert Holder.decode(content[:length]) is None


def test_damage_is_no_end_of_a_live_holder(tmp_path: Path) -> None:
    with Lease(tmp_path, print, SECONDS) as lease:
        path = tmp_path / LEASE
        path.write_bytes(path.read_bytes().replace(b'"process": ', b'"process": 9'))
        with pytest.raises(Held, match=f"process {os.getpid()} on "):
            Lease(tmp_path, print, 5.0)
        lease.check()


def test_a_host_that_is_gone_is_waited_for_once(directory: Location) -> None:
    first, said = Lease(directory, print), list[str]()
    elsewhere(directory, lease="x")
    started = time.monotonic()
    with Lease(directory, said.append, SECONDS):
        assert SECONDS <= time.monotonic() - started < SECONDS + 5
        with pytest.raises(LeaseLost, match=r"was taken over by process \d+ on "):
            first.check()
        first.__exit__()
        assert held_by(directory).host != "far"  # it was not the first one's to remove
    assert len(said) == 1
    assert "on far, started" in said[0]


def test_a_host_that_renews_is_refused(tmp_path: Path) -> None:
    with Lease(tmp_path, print, SECONDS):
        elsewhere(tmp_path, lease="x", renewed=1)
        with ThreadPoolExecutor(1) as other:
            taking = other.submit(Lease, tmp_path, print, 5.0)
            for renewed in itertools.count(2):
                if taking.done():
                    break
                elsewhere(tmp_path, renewed=renewed)
                time.sleep(0.1)
            with pytest.raises(Held, match="on far"):
                taking.result()
        assert held_by(tmp_path).lease == "x"


def test_a_suspended_holder_finds_out_that_it_was_taken_over(directory: Location) -> None:
    with Lease(directory, print, SECONDS) as lease:
        change(directory, lease="0" * 16)
        wait_until(lambda: lease.lost)
        with pytest.raises(LeaseLost, match=r"was taken over by process \d+ on "):
            lease.check()
        time.sleep(SECONDS)
        assert held_by(directory).lease == "0" * 16  # and it does not renew any more
    assert (directory / LEASE).exists()


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


@pytest.mark.parametrize("stale", [None, nightly("killed elsewhere"), "cut off"])
def test_of_several_that_come_at_once_one_has_it(directory: Location, stale: str | None) -> None:
    if stale:
        lease = Lease(directory, print)
        lease._over.set()
        elsewhere(directory, lease="x")
        if stale == "cut off":
            write_whole(directory / LEASE, b"")
    outcomes, over, barrier = list[str](), threading.Event(), threading.Barrier(4)

    def take() -> None:
        barrier.wait()
        try:
            with Lease(directory, lambda line: None, SECONDS):
                outcomes.append("held")
                over.wait(60)
        except Held:
            outcomes.append("refused")

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == 4)
    over.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", *["refused"] * 3]


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


def test_a_renewal_whose_answer_was_lost_does_not_lose_the_lease(server: ObjectServer) -> None:
    directory = location(f"s3://{BUCKET}/answer")
    with Lease(directory, print, SECONDS) as lease:
        change(directory, renewed=99)  # ours, as the holder would have written it
        wait_until(lambda: held_by(directory).renewed != 99)
        lease.check()
        assert not lease.lost


def test_a_store_without_conditions_is_refused(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = object_path.request

    def unconditional(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
        kept = {name: value for name, value in arguments.items() if not name.startswith("If")}
        return whole(url, operation, **kept)

    monkeypatch.setattr(object_path, "request", unconditional)
    with pytest.raises(ObjectError, match=f"^s3://{BUCKET}/without: the store ignores conditions of"):
        Lease(location(f"s3://{BUCKET}/without"), print)
    assert server.keys("without/") == []
