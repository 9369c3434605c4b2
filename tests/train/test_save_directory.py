"""Two runs in one --save, and checkpoints there that are not what their names say."""

import os
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.directory import TRACKER
from megatron_zpp.checkpoint.manifest import MARKER
from megatron_zpp.storage.lease import LEASE, Holder, Lease
from megatron_zpp.train.setup.run_file import RUN_FILE
from tests.support import Run, pretrain, wait_until
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, Resumed, train_here

RUN = ["--split", "100,0,0", *BYTES, *TINY, *SMALLEST]


def test_a_second_run_is_refused_and_a_killed_one_is_not_in_the_way(corpus: str, tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    flags = ["--data-path", corpus, *RUN, "--save", str(save), "--load", str(save)]
    with Run(tmp_path / "first", 1) as first:
        first.start(0, *flags, "--train-iters", "1000000")
        wait_until((save / RUN_FILE).exists)
        process = first.processes[0]
        before = sorted(save.iterdir())
        second = pretrain(*flags, "--train-iters", "3")
        assert second.returncode == 1
        assert f"error: --save {save}: is in use by another run, process {process.pid} on " in second.stderr
        assert second.stderr.count("\n") == 1
        assert sorted(save.iterdir()) == before
        process.kill()
        process.join()
    assert (save / LEASE).exists()
    assert pretrain(*flags, "--train-iters", "3").returncode == 0
    assert not (save / LEASE).exists()


def test_a_run_that_was_taken_over_saves_nothing_more(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "checkpoints"
    flags = ["--data-path", corpus, *RUN, "--save", str(save), "--train-iters", "9"]
    with Lease(save, print, 0.3) as lease:
        other = tmp_path / "other"
        other.write_bytes(Holder.of_this_process().encode())
        os.replace(other, save / LEASE)
        wait_until(lambda: lease.lost)
        ending = train_here([*flags, "--save-interval", "1"], lease=lease)
    assert ending.stop.status == 1
    assert "another run has taken over --save" in str(ending.stop)
    assert [path.name for path in save.iterdir()] == [LEASE]
    assert "was taken over by process" in capsys.readouterr().out


def test_a_checkpoint_that_lost_its_marker_is_named(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = Resumed(corpus, tmp_path)
    resumed("--train-iters", "2", "--save-interval", "1")
    newest = tmp_path / "checkpoints" / "iter_0000002"
    (newest / MARKER).unlink()
    resumed("--train-iters", "1")
    line = f" WARNING: {newest}, which {TRACKER} names, has no COMMITTED, so it is not"
    assert line in capsys.readouterr().out
    assert (newest.parent / TRACKER).read_text() == "1\n"


def test_a_directory_with_another_iterations_name_is_refused(corpus: str, tmp_path: Path) -> None:
    resumed = Resumed(corpus, tmp_path)
    resumed("--train-iters", "2")
    saved = tmp_path / "checkpoints"
    (saved / "iter_0000002").rename(saved / "iter_0000090")
    with pytest.raises(
        ValueError, match="iter_0000090: holds iteration 2, not 90; rename it to iter_0000002"
    ):
        resumed("--train-iters", "2")
