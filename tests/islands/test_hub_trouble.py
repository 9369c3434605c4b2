"""A hub whose disk is full or whose --keep is another one, and islands that connect at the same moment."""

import resource
import signal
import time

import pytest

from megatron_zpp.islands.messages import Traffic, Wire
from tests.islands.conftest import SECRET, Hub
from tests.islands.test_hub import SETTINGS, Island, connected, link, nothing, results
from tests.support import wait_until


def test_a_full_disk_is_named_by_both_sides_and_costs_no_island_a_step(hub: Hub) -> None:
    hub.start()
    said: list[str] = []
    both = [Island(hub, name, 1, said=said) for name in ("west", "east")]
    limits = resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    waiting = [future for island in both for future in island.send(50)]  # of 5 MB each
    full = f"File too large: '{hub.directory / 'log' / 'step_00000050'}"
    wait_until(lambda: len(said) == 2)
    assert all(f"no connection to the hub (it says [Errno 27] {full}" in line for line in said)
    assert full in hub.said
    time.sleep(3)  # the pauses between attempts have grown to the longest
    resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, limits)
    assert {outcome.members for outcome in results(waiting)} == {("west", "east")}
    for island in both:
        island.close()


@pytest.mark.parametrize("large", [0, 1])
def test_rank_0_says_what_the_hub_could_not_write_after_another_loss(hub: Hub, large: int) -> None:
    """Of any rank, which is silent itself."""
    hub.start()
    said: list[str] = []
    links = [link(hub, "west", rank, 2, said=said if rank == 0 else None) for rank in range(2)]
    results([each.newest() for each in links])
    hub.end(signal.SIGKILL)
    frames = [[bytes(2 << 20 if rank == large else 1)] for rank in range(2)]
    waiting = [each.exchange(0, frame, nothing, 0) for each, frame in zip(links, frames, strict=True)]
    wait_until(lambda: said)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # which the hub inherits
    try:
        hub.start("--wait", "0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    what = f"(it says [Errno 27] File too large: '{hub.directory}/log/step_00000000/west.{large}.frames')"
    wait_until(lambda: what in said[-1])
    resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, limits)
    results(waiting)
    wait_until(lambda: "connected to the hub again" in said[-1])
    assert len(said) <= 4  # rank 0 may have been connected before the other one failed
    for each in links:
        each.close(ended=True)


def test_a_smaller_keep_frees_the_disk_when_the_hub_starts(hub: Hub) -> None:
    """Before any other step is closed, for which a full disk has no room."""
    hub.start()
    west, east = Island(hub, "west", 1), Island(hub, "east", 1)
    for step in range(4):
        results(west.send(step) + east.send(step))
    hub.end(signal.SIGTERM)
    hub.start("--keep", "2")
    assert sorted(path.name[-1] for path in hub.directory.glob("log/step_*")) == ["2", "3"]
    results(west.send(4) + east.send(4))
    west.close()
    east.close()


def test_islands_of_different_lengths_are_told_so(hub: Hub) -> None:
    """And may be: all are started again one by one, to train longer."""
    hub.start()
    said: dict[str, list[str]] = {"west": [], "east": []}
    for name, length in (("west", 30), ("east", 60)):
        new = link(hub, name, length=length, said=said[name])
        new.newest().result(20)
    note = "--train-iters 60: west has 30; islands that end first leave the rest to the others"
    assert said == {"west": [], "east": [f"WARNING: {note}"]}
    assert f"east is here: 1 ranks; {note}\n" in hub.said


def test_of_islands_that_connect_at_the_same_moment_one_decides_the_settings(hub: Hub) -> None:
    hub.start()
    hello = {"rank": 0, "ranks": 1, "start": "1", "layout": "0", "length": 0}
    wires = []
    for name, rate in (("west", 0.7), ("east", 0.5)):
        wires.append(wire := Wire(connected(hub), Traffic()))
        wire.authenticate(SECRET.encode(), hub=False)
        wire.send({**hello, "island": name, "settings": SETTINGS | {"--outer-lr": rate}})
        assert wire.receive() == {"layout": True}
    answers = []
    for wire in wires:
        wire.send_text(b"{}")
        answers.append(wire.receive())
    assert answers[0] == {"welcome": True}
    assert "--outer-lr 0.5: of island east, but west began the log with 0.7" in answers[1]["refused"]
