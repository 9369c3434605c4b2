"""What a stranger with torch's own client of the store can do to a run: end it, but not steer or rob it."""

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.together import _agreed_candidates
from megatron_zpp.checkpoint.write import SaveFailed, write_checkpoint
from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed import rendezvous as module
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.job_store import VARIABLE, ForeignValue, JobStore, derived, job_key
from megatron_zpp.distributed.lifelines import Lifelines
from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.rendezvous import rendezvous
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.process import Process
from tests.support import free_port

MINUTE = timedelta(minutes=1)
ESCAPES = "\x1b]0;owned\x07 call 555-0100"


class Met:
    """Two ranks, on two nodes as far as they know, and a stranger's connection to their store.

    Where a launcher keeps the store, `keeper`, the ranks of `starting` alone start.
    """

    def __init__(
        self,
        cache: Path,
        secrets: tuple[str | None, str | None] = (None, None),
        *,
        keeper: dist.TCPStore | None = None,
        starting: tuple[int, ...] = (0, 1),
        limit: float = 20.0,
    ) -> None:
        self.port, self.ends = keeper.port if keeper else free_port(), {}
        self.ranks: dict[int, Rendezvous] = {}
        self._cache, self._secrets, self._kept, self._limit = cache, secrets, keeper is not None, limit
        starts = [threading.Thread(target=self._start, args=(rank,), daemon=True) for rank in starting]
        for each in starts:
            each.start()
        for each in starts:
            each.join(limit + 30)
        assert self.ranks.keys() | self.ends.keys() == set(starting), "a rank hangs"
        self.stranger = stranger_at(self.port)

    def place(self, rank: int) -> dict[str, str]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        place |= {"MEGATRON_ZPP_CACHE": str(self._cache), "TORCHELASTIC_USE_AGENT_STORE": str(self._kept)}
        secret = self._secrets[rank]
        return place if secret is None else place | {VARIABLE: secret}

    def key(self, rank: int) -> bytes:
        store = self.ranks[rank].store
        assert isinstance(store, JobStore)
        return store.key

    def _start(self, rank: int) -> None:
        try:
            self.ranks[rank] = rendezvous(
                Topology(rank, 2, 0, 1),
                self.place(rank),
                timedelta(seconds=self._limit),
                say=print,
                ended=print,
            )
        except ValueError as error:
            self.ends[rank] = str(error)

    def leave(self) -> None:
        for met in self.ranks.values():
            assert met.lifelines is not None
            met.lifelines.leave()


def stranger_at(port: int) -> dist.Store:
    """A connection to a run's store, which waits for no value for longer than a few seconds."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=5))
    return dist.PrefixStore("attempt_0", store)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a launcher, which is there before the ranks."""
    monkeypatch.setattr(module, "reserve_connections", lambda *_: None)
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


@pytest.fixture
def met(tmp_path: Path) -> Iterator[Met]:
    met = Met(tmp_path / "cache")
    yield met
    met.leave()


def test_the_store_has_no_secret(met: Met) -> None:
    key = met.key(0)
    assert key == met.key(1)
    published = met.stranger.get("rank_0") + met.stranger.get("here/1")
    for secret in (job_key(met.place(0)), key, derived(key, "lifelines")):
        assert secret.hex().encode() not in published
    assert json.loads(met.stranger.get("rank_0")[64:]).keys() == {"salt", "seconds", "lifelines"}


def test_a_stranger_who_knows_all_of_the_store_gets_no_lifeline(met: Met) -> None:
    """Everything that it can read is tried as the token."""
    texts = [met.stranger.get(key).decode() for key in ("rank_0", "here/0", "here/1")]
    heard: list[str] = []
    lines = Lifelines(Topology(0, 2, 0, 1), heard.append)
    port = lines.listen()
    lines.start(port, "127.0.0.1", derived(met.key(0), "lifelines").hex())
    for text in (*texts, *(text[:64] for text in texts), ""):
        stranger = Lifelines(Topology(1, 2, 0, 1), print)
        stranger.start(port, "127.0.0.1", text)
        assert not lines.complete
        stranger.leave()
    lines.leave()


@pytest.mark.parametrize("planted", ["null", '"call 555-0100"', ESCAPES, "", "0" * 64 + '"signed"'])
def test_a_value_of_a_stranger_is_an_error_that_names_the_key(met: Met, planted: str) -> None:
    store = met.ranks[1].store
    met.stranger.set("load/verdict", planted)
    if not planted:
        assert store.get("load/verdict") == b""  # nothing
        return
    for read in (
        store.get,
        lambda key: store.multi_get([key]),
        lambda key: store.compare_set(key, "", "mine"),
    ):
        with pytest.raises(ForeignValue, match=r"^'load/verdict' in the run's store was not written by"):
            read("load/verdict")


def test_a_value_cannot_be_moved_to_another_key(met: Met) -> None:
    met.ranks[0].store.set("one", "value")
    met.stranger.set("other", met.stranger.get("one"))
    assert met.ranks[1].store.get("one") == b"value"
    with pytest.raises(ForeignValue):
        met.ranks[1].store.get("other")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_does_not_meet_an_earlier_start(tmp_path: Path, keeper: dist.TCPStore, victim: int) -> None:
    """All that an earlier start of the job has signed is there before the rank, which starts alone."""
    met = Met(tmp_path, keeper=keeper)
    own = (f"here/{victim}", *(["rank_0", "verdict"] if victim == 0 else []))
    for key in own:
        met.stranger.delete_key(key)
    met.leave()
    began = time.monotonic()
    again = Met(tmp_path, keeper=keeper, starting=(victim,), limit=5)
    assert time.monotonic() - began < 5
    assert " in the run's store " in again.ends[victim]
    assert "\n" not in again.ends[victim]


def test_what_an_earlier_start_signed_is_refused_by_a_later_one(
    tmp_path: Path, keeper: dist.TCPStore
) -> None:
    met = Met(tmp_path, keeper=keeper)
    met.ranks[0].store.set("save/open", '{"problem": "call 555-0100"}')
    signed = met.stranger.get("save/open")
    for key in ("rank_0", "here/0", "here/1", "echo/0", "echo/1", "verdict"):
        met.stranger.delete_key(key)
    met.leave()
    again = Met(tmp_path, keeper=keeper)
    assert not again.ends
    again.stranger.set("save/open", signed)
    for rank in (0, 1):
        with pytest.raises(ForeignValue):
            again.ranks[rank].store.get("save/open")
    assert met.key(0) == met.key(1) != again.key(0) == again.key(1)
    again.leave()


@pytest.mark.parametrize("planted", ["null", "0" * 64 + "null", ""])
@pytest.mark.parametrize("key", ["rank_0", "here/0", "here/1", "echo/1", "verdict", "gave_up"])
def test_what_a_stranger_plants_early_ends_the_start_at_once(
    tmp_path: Path, keeper: dist.TCPStore, key: str, planted: str
) -> None:
    """Or does nothing: then the ranks meet."""
    stranger_at(keeper.port).set(key, planted)
    began = time.monotonic()
    met = Met(tmp_path, keeper=keeper, limit=5)
    assert time.monotonic() - began < 5
    if met.ends:
        assert met.ends.keys() == {0, 1}
    for end in met.ends.values():
        assert "\n" not in end
    met.leave()


def test_a_rank_writes_its_shards_below_save_alone(met: Met, tmp_path: Path) -> None:
    """A stranger is first to say where a checkpoint is opened."""
    final, elsewhere = tmp_path / "save" / "iter_0000001", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words in ({"problem": None, "partial": str(elsewhere)}, {"problem": None, "name": str(elsewhere)}):
        met.stranger.set("save/open", json.dumps(words))
        exchange = Exchange(met.ranks[1].store, Topology(1, 2, 0, 1), MINUTE, "save")
        with pytest.raises((ForeignValue, SaveFailed)):
            write_checkpoint(final, {"weights": torch.ones(3)}, {}, exchange, FileWorker())
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["../elsewhere/iter_0000001", "iter_0000001/..", "..", "", 1, None])
def test_checkpoints_that_rank_0_names_are_below_load(met: Met, tmp_path: Path, name: object) -> None:
    exchange = Exchange(met.ranks[1].store, Topology(1, 2, 0, 1), MINUTE, "load")
    load = str(tmp_path / "load")
    met.ranks[0].store.set("load/candidates", json.dumps(["iter_0000001"]))
    assert _agreed_candidates(load, None, exchange, FileWorker()) == [tmp_path / "load" / "iter_0000001"]
    met.ranks[0].store.set("load/candidates", json.dumps(["iter_0000001", name]))
    with pytest.raises(ValueError, match="a rank sent what is no name of a checkpoint"):
        _agreed_candidates(load, None, exchange, FileWorker())


def test_nodes_with_different_secrets_say_so_on_both(tmp_path: Path) -> None:
    met = Met(tmp_path / "cache", ("a" * 32, "b" * 32))
    assert met.ends.keys() == {0, 1}
    for end in met.ends.values():
        assert f"set {VARIABLE} to the same random text on all nodes" in end


def test_programs_that_a_rank_starts_do_not_get_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, "s" * 32)
    Process.start("test").connect(DistributedConfig())
    assert VARIABLE not in os.environ


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


@pytest.mark.parametrize("secret", ["", "secret"])
def test_a_short_secret_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match=rf"^{VARIABLE} \(of {len(secret)} characters\): must have 32 "):
        job_key({VARIABLE: secret})


def spoil(file: Path, how: str) -> None:
    """Make the file of a secret one that must not be used."""
    secret = file.read_text()
    file.unlink()
    if how == "is a symbolic link":
        planted = file.with_name("planted")
        planted.write_text("p" * 64)
        planted.chmod(0o600)
        file.symlink_to(planted)
    elif how == "is a symbolic link to nothing":
        file.symlink_to(file.with_name("missing"))
    elif how == "is not a plain file":
        os.mkfifo(file, 0o600)
    elif how == "is a directory":
        file.mkdir(mode=0o700)
    else:
        file.write_text(secret if "mode" in how else secret[: int(how.split()[1])])
        file.chmod(int(how.split()[2], 8) if "mode" in how else 0o600)


LINK, PLAIN = "is a symbolic link", "is not a plain file"
SAID = {LINK: LINK, f"{LINK} to nothing": LINK, PLAIN: PLAIN, "is a directory": PLAIN}
SAID |= {how: how for how in ("has mode 0640", "has mode 0602", "has 0 characters", "has 31 characters")}


@pytest.mark.parametrize(("how", "said"), SAID.items())
def test_a_file_that_others_may_know_is_refused(tmp_path: Path, how: str, said: str) -> None:
    place = {"MEGATRON_ZPP_CACHE": str(tmp_path / "cache")}
    key, file = job_key(place), tmp_path / "cache" / "job_secret"
    assert job_key(place) == key
    spoil(file, how)
    with pytest.raises(ValueError, match="must be a plain file of yours, mode 0600") as refused:
        job_key(place)
    assert str(refused.value).startswith(f"{file} {said}")
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    place = {"MEGATRON_ZPP_CACHE": str(tmp_path / "cache")}
    job_key(place)
    os.chown(tmp_path / "cache" / "job_secret", 1234, 1234)
    with pytest.raises(ValueError, match="belongs to user 1234"):
        job_key(place)
