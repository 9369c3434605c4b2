"""A save that is killed, or fails on any rank, leaves the checkpoints before it whole."""

import os
import resource
import signal
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.directory import TRACKER, candidates, committed
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.manifest import MANIFEST
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.write import SaveFailed, _commit
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import SECOND, TOKENIZER, save, small
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks


def test_saving_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, small(seed=1))
    path = save(tmp_path, small(seed=2), reads_back=True)
    other = small(seed=3)
    load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
    assert all(
        (weights_of(small(seed=2))[name] == weight).all() for name, weight in weights_of(other).items()
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def fails_on_one_rank(topology: Topology, directory: str) -> tuple[str, list[str]]:
    """The failure, and what rank 0, which cleans up, sees then; a later save succeeds."""
    engine, said = small(topology=topology, zero_stage=3), ""
    path = save(Path(directory), engine)
    engine.topology = Topology(topology.rank, 2, topology.rank, 2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if topology.rank == 1:  # a file size limit stops this rank's writes as a full disk would
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        save(Path(directory), engine, SECOND)
    except SaveFailed as failure:
        said = str(failure)
    there = sorted(each.name for each in Path(directory).iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
    save(Path(directory), engine, Progress(15, 150))
    return said, there


def test_a_failure_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, fails_on_one_rank, str(tmp_path))
    assert first[0] == second[0]
    assert "rank 1 on " in first[0]
    assert "File too large" in first[0]
    assert first[1] == ["iter_0000005", TRACKER]
    assert [path.name for path in candidates(str(tmp_path))] == ["iter_0000015", "iter_0000005"]


def test_what_a_save_makes_durable_and_in_which_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills leave the page cache as it is: only the order of the calls tells what a power cut leaves."""
    calls: list[tuple[str, ...]] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        calls.append(("rename", str(source), str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    path = save(tmp_path, small())
    partial = f"{path}.partial"
    rename = calls.index(("rename", partial, str(path)))
    flushed = {file.name: calls.index(("fsync", f"{partial}/{file.name}")) for file in path.iterdir()}
    assert all(at < rename for at in flushed.values())
    marker = flushed.pop("COMMITTED")
    assert all(at < marker for at in flushed.values())
    assert marker < calls.index(("fsync", partial)) < rename
    assert calls[rename + 1] == ("fsync", str(tmp_path))


@pytest.mark.parametrize("harm", ["cut", "lost lease"])
def test_a_save_asks_again_before_it_commits(tmp_path: Path, harm: str) -> None:
    """Whether the directory is still this run's, and whether all files have the size that was written."""
    asked: list[int] = []

    def may_write() -> None:
        asked.append(len(asked))
        (file,) = [*tmp_path.glob("*/rank_00000.safetensors")] or [None]
        if file is None:  # before anything is written
            return
        if harm == "lost lease":
            raise OSError("another run has --save now")
        os.truncate(file, file.stat().st_size - 1)

    said = "another run has --save now" if harm == "lost lease" else "it is not there as seen from here"
    with pytest.raises(SaveFailed, match=said):
        save(tmp_path, small(), may_write=may_write)
    assert len(asked) >= 2
    assert not committed(tmp_path)


def test_a_save_that_is_abandoned_at_its_end_gets_no_name(tmp_path: Path) -> None:
    """Its manifest is there already, and the last that asks is who would give it the name."""
    partial, final = tmp_path / "iter_0000005.partial", tmp_path / "iter_0000005"
    partial.mkdir()

    def abandoned_at_its_end() -> None:
        if (partial / MANIFEST).exists():
            raise OSError("too late")

    with pytest.raises(OSError, match="too late"):
        _commit(partial, final, {"state.json": b"{}"}, 1, [], abandoned_at_its_end)
    assert sorted(each.name for each in tmp_path.iterdir()) == [partial.name]
