"""Links that another user has planted in a shared directory are not followed by what is written there."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_zpp.checkpoint.directory import TRACKER, write_tracker
from megatron_zpp.commands import plot, report
from megatron_zpp.config.run import LoggingConfig, TimingConfig
from megatron_zpp.data.order_cache import write_arrays
from megatron_zpp.data.text.open import _entry
from megatron_zpp.reporting.profile import StepProfiler
from megatron_zpp.reporting.sinks import check_sinks, metrics_file
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.files import locked, open_shared, write_durably, write_text
from tests.support import forked


def write_checksummed(shared: Path) -> None:
    writer = ChecksummedWriter(shared / "rank_00000.safetensors")
    writer.write(b"new")
    writer.finish()
    writer.close()


def write_the_tracker(shared: Path) -> None:
    (shared / "iter_0000003").mkdir()
    (shared / "iter_0000003" / "COMMITTED").touch()
    write_tracker(shared)


def write_an_array(shared: Path) -> None:
    write_arrays(shared, [("x", np.arange(3))])


def write_a_trace(shared: Path) -> None:
    config = TimingConfig(profile=True, profile_step_start=1, profile_step_end=2)
    profiler = StepProfiler(config, shared, 0, torch.device("cpu"))
    profiler.before_step(1)
    profiler.end(1)


def draw(program: ModuleType, name: str) -> Callable[[Path], None]:
    def write(shared: Path) -> None:
        lines = ('{"iteration": 1, "lm_loss": 2.0}', '{"iteration": 2, "lm_loss": 1.0}')
        (shared / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        argv = ["x", str(shared / "metrics.jsonl"), "--output", str(shared / name)]
        with patch.object(sys, "argv", argv):
            program.main()

    return write


@pytest.mark.parametrize(
    ("link", "written", "write"),
    [
        ("file", "file", lambda shared: write_durably(shared / "file", b"new")),
        ("config.yaml.partial", "config.yaml", lambda shared: write_text(shared / "config.yaml", "new")),
        ("rank_00000.safetensors", "rank_00000.safetensors", write_checksummed),
        (f"{TRACKER}.partial", TRACKER, write_the_tracker),
        ("checksums.json", "checksums.json", write_an_array),
        ("x.npy", "x.npy", write_an_array),
        ("rank0.trace.json.gz", "rank0.trace.json.gz", write_a_trace),
        ("report.html", "report.html", draw(report, "report.html")),
        ("loss.svg.partial", "loss.svg", draw(plot, "loss.svg")),
    ],
)
def test_a_planted_link_is_replaced(
    tmp_path: Path, link: str, written: str, write: Callable[[Path], None]
) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    (shared / link).symlink_to(victim)
    write(shared)
    assert victim.read_text() == "mine"
    assert stat.S_ISREG((shared / written).lstat().st_mode)
    assert (shared / written).stat().st_size


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_link_in_place_of_a_shared_file_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "counts").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match=r"[Ss]ymbolic link"):
        os.close(open_shared(tmp_path / "counts"))
    with pytest.raises(OSError, match=r"[Ss]ymbolic link"), locked(tmp_path / "counts"):
        pass
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_metrics_follow_the_links_of_the_user_in_any_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "second").symlink_to("metrics")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    check_sinks(LoggingConfig(metrics_file=str(tmp_path / "first")))
    for _ in range(2):
        with metrics_file(str(tmp_path / "first"), print) as write:
            write({"iteration": 1})
    assert (tmp_path / "metrics").read_text() == '{"iteration": 1}\n' * 2
    (tmp_path / "metrics").unlink()
    (tmp_path / "metrics").symlink_to("first")
    with pytest.raises(ValueError, match=r"--metrics-file .*symbolic links.*; name another file"):
        check_sinks(LoggingConfig(metrics_file=str(tmp_path / "first")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o755])
def test_metrics_follow_links_of_others_only_where_others_cannot_make_them(tmp_path: Path, mode: int) -> None:
    """Also behind a link of the user's own."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "planted").symlink_to(tmp_path / "victim")
    os.lchown(shared / "planted", 12345, 12345)
    (shared / "mine").symlink_to("planted")
    for link in ("planted", "mine"):
        if mode == 0o755:
            with metrics_file(str(shared / link), print) as write:
                write({"iteration": 1})
            continue
        with pytest.raises(PermissionError, match="is a link of user 12345 in a directory that others can"):
            metrics_file(str(shared / link), print).__enter__()
    assert (tmp_path / "victim").exists() == (mode == 0o755)


def write_to_stdout() -> None:
    with metrics_file("/dev/stdout", print) as write:
        write({"iteration": 1})


def test_metrics_may_go_to_stdout_whatever_it_is(tmp_path: Path) -> None:
    """A pipe, to which no path leads, and a file."""
    read, write = os.pipe()
    forked(write_to_stdout, stdout=f"/proc/{os.getpid()}/fd/{write}")
    assert os.read(read, 1000) == b'{"iteration": 1}\n'
    (tmp_path / "out").touch()
    forked(write_to_stdout, stdout=tmp_path / "out")
    assert (tmp_path / "out").read_text() == '{"iteration": 1}\n'


def test_the_description_of_cached_tokens_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    entry = _entry(tmp_path / "cache", {"text": "a"})
    (entry / "made_of.json").unlink()
    (entry / "made_of.json").symlink_to(tmp_path / "victim")
    assert _entry(tmp_path / "cache", {"text": "a"}) == entry
    assert (tmp_path / "victim").read_text() == "mine"
    assert stat.S_ISREG((entry / "made_of.json").lstat().st_mode)
