"""A checkpoint is read back from the disk beside the training; only then are older ones removed."""

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint import together as module
from megatron_zpp.checkpoint.directory import candidates
from megatron_zpp.checkpoint.together import NotReadBack
from megatron_zpp.checkpoint.write import SaveFailed
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.saving.saver import Saver
from tests.checkpoint.saving import FIRST, SECOND, flip, save, small
from tests.train.conftest import BYTES
from tests.train.in_process import SMALLEST, train_here
from tests.zero.ranks import on_ranks

LIMIT = 60  # seconds that a test waits for what must come soon
RUN = [*"--mock-data --seq-length 8 --lr 1e-3 --log-interval 1 --save-interval 2 --keep-last 1".split()]
RUN += [*BYTES, *SMALLEST]


def before_reading(act: Callable[[Path], None]) -> None:
    """`act` is called with the file that is read back next; until the process or the test ends."""
    verify = module._verify

    def acting(path: Path, *arguments: Any) -> None:
        act(path)
        verify(path, *arguments)

    module._verify = acting


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes `before_reading`."""
    monkeypatch.setattr(module, "_verify", module._verify)


def outcome_of(topology: Topology, directory: str, what: str) -> str:
    """The outcome of a second save whose file of rank 1 is changed before it is read back."""
    engine = small(topology=topology, zero_stage=3)
    save(Path(directory), engine, FIRST, reads_back=True)

    def change(path: Path) -> None:
        if path.name != "rank_00001.safetensors":
            return
        if what == "unreadable":
            raise PermissionError(13, "Permission denied", str(path))
        if what == "silent":
            time.sleep(3.5)
        elif what == "missing":
            path.unlink()
        else:
            flip(path.with_name(f"{path.name}.sha256") if what == "sidecar" else path)

    before_reading(change)
    try:
        timeout = timedelta(seconds=1.5 if what == "silent" else LIMIT)
        save(Path(directory), engine, SECOND, reads_back=True, timeout=timeout)
    except NotReadBack as problem:
        if what == "silent":
            time.sleep(3)  # the abandoned work ends
        return str(problem)
    return "read back"


OUTCOMES = {
    "shards": ".*rank_00001.safetensors: damaged between bytes 0 and",
    "sidecar": ".*rank_00001.safetensors.sha256: its SHA-256 is not",
    "unreadable": "--save .*: rank 1 on .*Permission denied",
    "silent": "--save .*: rank 1 .*progress for 0:00:01.5",
    "missing": ".*rank_00001.safetensors: No such file",
}


def outcomes_of(topology: Topology, directory: str) -> list[str]:
    verify, outcomes = module._verify, []
    for what in OUTCOMES:
        outcomes.append(outcome_of(topology, f"{directory}/{what}", what))
        module._verify = verify
    return outcomes


def test_damage_on_one_rank_is_known_to_all_and_nothing_is_removed(tmp_path: Path) -> None:
    first, second = on_ranks(2, outcomes_of, str(tmp_path))
    assert first == second
    for (what, expected), said in zip(OUTCOMES.items(), first, strict=True):
        assert re.match(expected, said), said
        assert "\n" not in said
        kept = [path.name for path in candidates(str(tmp_path / what))]
        assert kept == ["iter_0000010", "iter_0000005"]


@pytest.mark.parametrize("flags", [[], ["--async-save"]])
def test_training_waits_for_no_read_back_and_nothing_is_removed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchanged: None, flags: list[str]
) -> None:
    """The read-back of iteration 4 waits until step 5 is done, which is never if step 5 waits for it."""
    stepped, there = threading.Event(), []

    def wait(path: Path) -> None:
        if path.parent.name == "iter_0000004":
            assert stepped.wait(LIMIT), "the training waits"
            there.append(sorted(found.name for found in tmp_path.glob("iter_*")))

    before_reading(wait)
    after_step, steps = Saver.after_step, 0

    def count(self: Saver) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            stepped.set()
        after_step(self)

    monkeypatch.setattr(Saver, "after_step", count)
    ending = train_here([*RUN, *flags, "--train-iters", "5", "--save", str(tmp_path)])
    assert ending.stop is None
    assert there == [["iter_0000002", "iter_0000004"]]
    assert [path.name for path in candidates(str(tmp_path))] == ["iter_0000005"]


def test_a_damaged_checkpoint_keeps_the_older_one_and_fails_the_run_if_it_is_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unchanged: None
) -> None:
    verify = module._verify
    before_reading(lambda path: flip(path) if path.parent.name != "iter_0000002" else None)
    with pytest.raises(SaveFailed, match=r"iter_0000005/rank_00000\.safetensors: damaged"):
        train_here([*RUN, "--train-iters", "5", "--save", str(tmp_path)])
    said = capsys.readouterr().out
    assert "WARNING: the newest checkpoint could not be read back: " in said
    assert "iter_0000004/rank_00000.safetensors: damaged between bytes 0 and " in said
    assert "; older ones are kept; training continues" in said
    there = [path.name for path in candidates(str(tmp_path))]
    assert there == ["iter_0000005", "iter_0000004", "iter_0000002"]
    module._verify = verify
    train_here([*RUN, "--train-iters", "5", "--save", str(tmp_path), "--load", str(tmp_path)])
    said = capsys.readouterr().out
    assert "iter_0000002; resuming at iteration 2" in said
    assert [path.name for path in candidates(str(tmp_path))] == ["iter_0000005"]
