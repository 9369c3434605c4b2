"""Islands exchange frames through a hub: real processes and sockets, killed, stopped and lied to."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from megatron_zpp.islands.link import Link, Outcome
from megatron_zpp.islands.messages import HubRefused, Traffic, Wire
from tests.islands.conftest import SECRET, Hub
from tests.support import ROOT, environment, refusal, run, wait_until

SETTINGS = {"--outer-interval": 30, "--outer-lr": 0.7}
# An island whose rank 0 alone contributes to a step.
HALF = """
import json, sys, time
from megatron_zpp.islands.link import Link
address, secret, name, step, ranks, settings = sys.argv[1:]
links = [
    Link(address, secret.encode(), island=name, rank=rank, ranks=int(ranks), start="half", layout="{}",
         settings=json.loads(settings), say=print)
    for rank in range(int(ranks))
]
for link in links:
    link.newest().result()
links[0].exchange(int(step), [b"half"], lambda layouts: [[] for _ in layouts], 0)
time.sleep(60)
"""


def nothing(layouts: Sequence[str]) -> list[list[int]]:
    return [[] for _ in layouts]


def first_of_each(layouts: Sequence[str]) -> list[list[int]]:
    return [[0] for _ in layouts]


def both_of_each(layouts: Sequence[str]) -> list[list[int]]:
    return [[1, 0] for _ in layouts]


class Island:
    """The ranks of an island, each with its link, in this process."""

    def __init__(
        self, hub: Hub, name: str, ranks: int, *, start: str = "1", said: list[str] | None = None
    ) -> None:
        self.name, self.start = name, start
        self.links = [
            link(hub, name, rank, ranks, start=f"{name} {start}", said=said) for rank in range(ranks)
        ]

    def frames(self, step: int, rank: int) -> list[bytes]:
        """Two frames per rank, of which the second is empty in the first step."""
        return [f"{self.name} {self.start} {rank} {step}".encode(), bytes(step * 100_000)]

    def send(self, step: int) -> list[Future[Outcome]]:
        return [
            link.exchange(
                step,
                self.frames(step, rank),
                lambda layouts: [json.loads(text)["frames"] for text in layouts],
                100 * step,
            )
            for rank, link in enumerate(self.links)
        ]

    def close(self, *, ended: bool = False) -> None:
        for link in self.links:
            link.close(ended=ended)


def link(
    hub: Hub, name: str, rank: int = 0, ranks: int = 1, *, said: list[str] | None = None, **other: Any
) -> Link:
    given = {
        "secret": SECRET.encode(),
        "start": f"{name} 1",
        "layout": json.dumps({"rank": rank, "frames": [1, 0]}),
        "settings": SETTINGS,
        "say": ([] if said is None else said).append,
    }
    return Link(hub.address, island=name, rank=rank, ranks=ranks, **given | other)


def results(futures: list[Future[Outcome]]) -> list[Outcome]:
    return [future.result(20) for future in futures]


def got(outcome: Outcome) -> dict[str, list[list[Any]]]:
    """What came, by member: rank of its layout, index and bytes of each frame."""
    return {
        name: [[json.loads(frame.layout)["rank"], frame.index, bytes(frame.data)] for frame in frames]
        for name, frames in outcome.frames.items()
    }


def sent(island: Island, step: int) -> list[list[Any]]:
    """What comes from all ranks of an island: the frames that are wanted, in that order."""
    frames = [island.frames(step, rank) for rank in range(len(island.links))]
    return [[rank, index, of_rank[index]] for rank, of_rank in enumerate(frames) for index in (1, 0)]


def half_island(hub: Hub, step: int) -> subprocess.Popen[bytes]:
    """A process that is east with two ranks, once one of them has contributed to the step."""
    argv = [hub.address, SECRET, "east", str(step), "2", json.dumps(SETTINGS)]
    process = subprocess.Popen([sys.executable, "-c", HALF, *argv], cwd=ROOT, env=environment())
    wait_until(lambda: list(hub.directory.glob(f"log/step_{step:08d}/east.0.frames")))
    return process


def test_islands_of_different_sizes_get_the_frames_of_each_other(hub: Hub) -> None:
    hub.start()
    west, east = Island(hub, "west", 2), Island(hub, "east", 3)
    assert west.links[0].newest().result(20)[0] == -1
    for step in range(3):
        late = west.send(step)
        for outcome in results(east.send(step)):
            assert (outcome.step, outcome.members) == (step, ("west", "east"))
            assert got(outcome) == {"west": sent(west, step)}
        assert [got(outcome) for outcome in results(late)] == [{"east": sent(east, step)}] * 2
    assert west.links[0].newest().result(20)[0] == 2
    assert 300_000 < west.links[0].traffic.sent < 302_000
    assert 900_000 < west.links[0].traffic.received < 902_500
    assert "west is here: 2 ranks" in hub.said
    west.close(ended=True)
    begun = time.monotonic()  # who has ended is not waited for, and its end is no loss
    assert results(east.send(3))[0].members == ("east",)
    assert time.monotonic() - begun < 5
    east.close()
    wait_until(lambda: "east is gone" in hub.said)
    assert "west has ended" in hub.said
    assert "west is gone" not in hub.said
    assert hub.end(signal.SIGTERM) == 0


def test_an_island_that_hangs_is_waited_for_once_and_returns_with_another_size(hub: Hub) -> None:
    hub.start("--wait", "1.5")
    west = Island(hub, "west", 2)
    first = west.send(5)  # a log may begin with any step, and awaits all islands
    assert [outcome.members for outcome in results(first)] == [("west",)] * 2
    half = half_island(hub, 6)
    half.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert [got(outcome) for outcome in results(west.send(6))] == [{}, {}]
    assert time.monotonic() - begun >= 1.5
    begun = time.monotonic()
    results(west.send(7))
    assert time.monotonic() - begun < 1.5
    assert "outer step 6: west, without east;" in hub.said
    half.kill()
    east = Island(hub, "east", 1)
    assert east.links[0].newest().result(20)[0] == 7
    assert [got(east.links[0].past(step, both_of_each).result(20)) for step in (6, 7)] == [
        {"west": sent(west, step)} for step in (6, 7)
    ]
    late = results(east.send(7))[0]
    assert got(late) == {"west": sent(west, 7)}  # dropped: too late, and not a member
    assert f"east was {late.late:.1f} s behind the first island at outer step 7, so what it" in hub.said
    both = results(west.send(8) + east.send(8))
    assert {outcome.members for outcome in both} == {("west", "east")}
    assert got(both[0]) == {"east": sent(east, 8)}
    west.close()
    east.close()
    half.wait()


def test_a_killed_hub_continues_with_whole_contributions(hub: Hub) -> None:
    hub.start("--wait", "30")
    said: list[str] = []
    west, east = Island(hub, "west", 2, said=said), Island(hub, "east", 2)
    results(west.send(0) + east.send(0))
    waiting = west.send(1)
    log = hub.directory / "log"
    wait_until(lambda: len(list(log.glob("step_00000001/west.*.frames"))) == 2)
    half = east.links[0].exchange(1, east.frames(1, 0), first_of_each, 0)
    wait_until(lambda: list(log.glob("step_00000001/east.0.frames")))
    (log / "step_00000001" / "east.1.frames.partial").write_bytes(b"{")
    used, unused = [*(log / "layouts").iterdir()], log / "layouts" / f"{'0' * 64}.json"
    unused.touch()
    hub.end(signal.SIGKILL)
    wait_until(lambda: said)
    hub.start("--wait", "30")
    wait_until(lambda: hub.said.count("is here") == 4)  # west alone does not close the step
    rest = east.links[1].exchange(1, east.frames(1, 1), first_of_each, 0)
    assert [got(outcome) for outcome in results(waiting)] == [{"east": sent(east, 1)}] * 2
    assert {outcome.members for outcome in results([half, rest])} == {("west", "east")}
    assert sorted((log / "layouts").iterdir()) == sorted(used)
    assert len(said) <= 4, said  # two lines per rank
    assert said[0].startswith(f"--islands-at {hub.address}: no connection to the hub (")
    assert f"--islands-at {hub.address}: connected to the hub again" in said
    west.close()
    east.close()
    other = run(*hub.argv())
    assert (other.returncode, other.stdout) == (1, "")
    assert "--directory" in other.stderr
    assert "another hub uses it" in other.stderr
    file = str(hub.directory / "out")
    assert f"--directory {file}: Not a directory; " in run(*hub.argv("--directory", file)).stderr
    assert hub.end(signal.SIGINT) == 0
    assert (
        "--names west north: the log in --directory has west east"
        in run(*hub.argv("--names", "west", "north")).stderr
    )


def test_what_is_refused_is_refused_in_a_line_and_harms_nobody(hub: Hub) -> None:
    hub.start("--keep", "2", "--quorum", "2")
    west = Island(hub, "west", 2)
    west.links[0].newest().result(20)
    east = Island(hub, "east", 1)
    for step in range(4, 8):
        results(west.send(step) + east.send(step))
    log = hub.directory / "log"
    assert sorted(path.name for path in log.glob("step_*")) == ["step_00000006", "step_00000007"]
    where = "load the checkpoint of another island, or raise --keep"
    for future, text in (
        (
            west.links[0].past(5, nothing),
            f"the hub keeps outer steps from 6 on, and 5 is needed: {where}",
        ),
        (west.links[0].exchange(9, [], nothing, 0), "outer step 9 cannot begin: the hub's open one is 8"),
        (west.links[0].past(8, nothing), "outer step 8 is not closed yet"),
    ):
        assert text in refusal(future.result, 20, error=HubRefused)
    for step, kept in ((6, -1), (7, 0)):
        file = log / f"step_{step:08d}" / "east.0.frames"
        file.write_bytes(file.read_bytes()[:kept])
        text = f"outer step {step} cannot be taken, because the hub's {file} is too short: load"
        assert text in refusal(west.links[0].past(step, both_of_each).result, 20, error=HubRefused)
    for other, text in (
        ({"secret": b"x" * 16}, f"--island-secret: the hub at {hub.address} has another secret"),
        ({"name": "north"}, "--island north: the hub has --names west east; give one of these"),
        ({"ranks": 3}, "rank 0 says that it has 3 ranks, and its first rank said 1"),
        (
            {"settings": SETTINGS | {"--outer-lr": 0.5}},
            "--outer-lr 0.5: of island east, but west began the log with 0.7; give all islands the same",
        ),
    ):
        refused = link(hub, **{"name": "east"} | other)
        for _ in range(2):
            assert text in refusal(refused.newest().result, 20, error=HubRefused)
        refused.close(ended=True)
    assert "has another secret than --secret-file" in hub.said
    alone = west.send(8)
    time.sleep(0.3)
    assert not alone[0].done()  # a quorum is obeyed
    results(east.send(8) + alone)
    west.close()
    east.close()


def connected(hub: Hub) -> socket.socket:
    host, port = hub.address.split(":")
    return socket.create_connection((host, int(port)))


def test_strangers_cost_a_line_each(hub: Hub) -> None:
    hub.start("--wait", "0.1")
    silent = [connected(hub) for _ in range(20)]
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\4none", os.urandom(1000)):
        with connected(hub) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # the hub's challenge, and the end
                    pass
    for garbage in (b"[]", b"{}", b'{"island": [], "rank": {}}', b"\xff"):
        knows = Wire(connected(hub), Traffic())
        knows.authenticate(SECRET.encode(), hub=False)
        knows.send_text(garbage)
        with pytest.raises((EOFError, ConnectionError)):
            knows.receive()
    mistaken = link(hub, "west", start="west 0", settings=SETTINGS | {"--outer-lr": 0.5})
    assert mistaken.newest().result(20)[0] == -1
    mistaken.close(ended=True)
    west = Island(hub, "west", 2)
    results(west.send(0))
    west.close()
    assert hub.said.count("no island: connection closed: ") + hub.said.count("another secret") == 8
    for stranger in silent:
        stranger.close()


def test_a_rank_that_returns_replaces_its_lost_connection(hub: Hub) -> None:
    hub.start("--wait", "30")
    half_open = Wire(connected(hub), Traffic())
    half_open.authenticate(SECRET.encode(), hub=False)
    hello = {"island": "west", "rank": 0, "ranks": 1, "start": "west 1", "layout": "0", "length": 0}
    half_open.send(hello | {"settings": SETTINGS})
    half_open.receive()
    half_open.send_text(b"{}")
    assert half_open.receive() == {"welcome": True}
    again = link(hub, "west", layout=json.dumps({"rank": 0, "frames": [0]}))
    assert again.newest().result(20)[0] == -1
    with pytest.raises(EOFError):
        half_open.receive()


def test_frames_of_an_earlier_start_count_once_they_are_whole(hub: Hub) -> None:
    hub.start("--quorum", "2")
    west = Island(hub, "west", 2)
    waiting = west.send(0)
    wait_until(lambda: len(list((hub.directory / "log").glob("step_00000000/west.*.frames"))) == 2)
    later = Island(hub, "west", 2, start="2")
    again = later.send(0)
    assert "west: was started again" in refusal(waiting[0].result, 20, error=HubRefused)
    east = Island(hub, "east", 1)
    assert got(results(east.send(0))[0]) == {"west": sent(west, 0)}
    assert [got(outcome) for outcome in results(again)] == [
        {"west": sent(west, 0), "east": sent(east, 0)}
    ] * 2
    for island in (west, later, east):
        island.close()


def test_a_connection_that_breaks_costs_no_step(hub: Hub) -> None:
    hub.start()
    west, east = Island(hub, "west", 1), Island(hub, "east", 1)
    for island in (west, east):
        island.links[0].newest().result(20)
    waiting = west.send(0)
    wait_until(lambda: list(hub.directory.glob("log/step_00000000/west.0.frames")))
    east.links[0]._wire.shutdown()
    wait_until(lambda: "east is gone" in hub.said)
    assert {outcome.members for outcome in results(waiting + east.send(0))} == {("west", "east")}
    large, before = os.urandom(1 << 20) * 64, west.links[0].traffic.sent
    first = west.links[0].exchange(1, [large, b"last"], nothing, 0)
    wait_until(lambda: west.links[0].traffic.sent > before + 1000, every=0.001)
    west.links[0]._wire.shutdown()
    second = east.links[0].exchange(1, [], both_of_each, 0)
    wait_until(lambda: east.links[0].traffic.received > 4 << 20, every=0.001)
    east.links[0]._wire.shutdown()
    last, whole = second.result(20).frames["west"]
    assert (bytes(last.data), whole.data == large) == (b"last", True)
    assert first.result(20).frames == {"east": []}
    west.close()
    east.close()
