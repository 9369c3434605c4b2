"""What a stranger with torch's own client of the store can do to a run: end it, but not steer or rob it."""

import json
import os
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.write import SaveFailed, SaveOptions, write_checkpoint
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.job_store import VARIABLE, ForeignValue, JobStore, derived, job_key
from megatron_zpp.distributed.lifelines import Lifelines
from megatron_zpp.distributed.rendezvous import Rendezvous, rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.heartbeat_messages import HeartbeatMessage
from tests.support import free_port

MINUTE = timedelta(minutes=1)
ESCAPES = "\x1b]0;owned\x07 call 555-0100"


def ignore(line: str) -> None:
    """What a rank says."""


class Met:
    """Two ranks, on two nodes as far as they know, and a stranger's connection to their store."""

    def __init__(self, cache: Path, secrets: tuple[str, str] = ("", "")) -> None:
        self.port, self.ends = free_port(), {}
        self.ranks: dict[int, Rendezvous] = {}
        self._cache, self._secrets = cache, secrets
        starts = [threading.Thread(target=self._start, args=(rank,)) for rank in range(2)]
        for each in starts:
            each.start()
        for each in starts:
            each.join()
        self.stranger = dist.PrefixStore("attempt_0", dist.TCPStore("127.0.0.1", self.port, None, False))

    def place(self, rank: int) -> dict[str, str]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        return place | {"MEGATRON_ZPP_CACHE": str(self._cache), VARIABLE: self._secrets[rank]}

    def _start(self, rank: int) -> None:
        try:
            self.ranks[rank] = rendezvous(
                Topology(rank, 2, 0, 1), self.place(rank), limit=20, timeout=MINUTE, say=ignore, ended=ignore
            )
        except ValueError as error:
            self.ends[rank] = str(error)

    def leave(self) -> None:
        for met in self.ranks.values():
            assert met.lifelines is not None
            met.lifelines.leave()


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    met = Met(tmp_path / "cache")
    yield met
    met.leave()


def test_the_store_has_no_secret(met: Met) -> None:
    key = job_key(met.place(0))
    assert key == job_key(met.place(1))
    published = met.stranger.get("rank_0") + met.stranger.get("here/1")
    for secret in (key, derived(key, "lifelines"), derived(key, "snapshots")):
        assert secret.hex().encode() not in published
    assert json.loads(met.stranger.get("rank_0")[64:])["root"].keys() == {"port"}


def test_a_stranger_who_knows_all_of_the_store_gets_no_lifeline(met: Met) -> None:
    """Everything that it can read is tried as the token."""
    texts = [met.stranger.get(key).decode() for key in ("rank_0", "here/0", "here/1")]
    heard: list[str] = []
    lines = Lifelines(Topology(0, 2, 0, 1), heard.append, ignore)
    root = lines.listen()
    lines.start(root, "127.0.0.1", derived(job_key(met.place(0)), "lifelines").hex())
    for text in (*texts, *(text[:64] for text in texts), ""):
        stranger = Lifelines(Topology(1, 2, 0, 1), ignore, ignore)
        stranger.start(root, "127.0.0.1", text)
        assert not lines.complete
        stranger.leave()
    lines.leave()


@pytest.mark.parametrize("planted", ["null", '"call 555-0100"', ESCAPES, "", "0" * 64 + '"signed"'])
def test_a_value_of_a_stranger_is_an_error_that_names_the_key(met: Met, planted: str) -> None:
    store = met.ranks[1].store
    met.stranger.set("heartbeat/verdict", planted)
    if not planted:
        assert store.get("heartbeat/verdict") == b""  # nothing
        return
    for read in (
        store.get,
        lambda key: store.multi_get([key]),
        lambda key: store.compare_set(key, "", "mine"),
    ):
        with pytest.raises(ForeignValue, match=r"^'heartbeat/verdict' in the run's store was not written by"):
            read("heartbeat/verdict")


def test_a_value_cannot_be_moved_to_another_key_or_start(met: Met, tmp_path: Path) -> None:
    met.ranks[0].store.set("one", "value")
    met.stranger.set("other", met.stranger.get("one"))
    assert met.ranks[1].store.get("one") == b"value"
    with pytest.raises(ForeignValue):
        met.ranks[1].store.get("other")
    again = JobStore(met.ranks[1].store.unsigned, job_key(met.place(1) | {"TORCHELASTIC_RESTART_COUNT": "1"}))
    with pytest.raises(ForeignValue):
        again.get("one")


def test_a_rank_writes_its_shards_below_save_alone(met: Met, tmp_path: Path) -> None:
    """A stranger is first to say where a checkpoint is opened."""
    final, elsewhere = tmp_path / "save" / "iter_0000001", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words in ({"problem": None, "partial": str(elsewhere)}, {"problem": None, "name": str(elsewhere)}):
        met.stranger.set("save/open", json.dumps(words))
        exchange = Exchange(met.ranks[1].store, Topology(1, 2, 0, 1), MINUTE, "save")
        with pytest.raises((ForeignValue, SaveFailed)):
            write_checkpoint(final, {"weights": torch.ones(3)}, {}, exchange, SaveOptions())
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("text", [b"null", b""])
def test_heartbeats_of_nobody_are_no_messages(text: bytes) -> None:
    assert HeartbeatMessage.decode(text) is None


def test_nodes_with_different_secrets_say_so_on_both(tmp_path: Path) -> None:
    met = Met(tmp_path / "cache", ("a" * 32, "b" * 32))
    assert met.ends.keys() == {0, 1}
    for end in met.ends.values():
        assert f"set {VARIABLE} to the same random text on all nodes" in end


def test_a_common_secret_needs_no_file(tmp_path: Path) -> None:
    met = Met(tmp_path / "cache", ("c" * 32, "c" * 32))
    assert not met.ends
    assert not (tmp_path / "cache").exists()
    met.leave()


def test_the_file_of_a_user_is_private_and_made_once(tmp_path: Path) -> None:
    place, found = {"MEGATRON_ZPP_CACHE": str(tmp_path / "cache")}, []
    starts = [threading.Thread(target=lambda: found.append(job_key(place))) for _ in range(8)]
    old = os.umask(0)
    try:
        for each in starts:
            each.start()
        for each in starts:
            each.join()
    finally:
        os.umask(old)
    assert len(set(found)) == 1
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(found[0]) == 32


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"^{VARIABLE} \(of 6 characters\): must have 32 "):
        job_key({VARIABLE: "secret"})
