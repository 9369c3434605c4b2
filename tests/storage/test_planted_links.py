"""Links that another user has planted in a shared directory are not followed by what is written there."""

import errno
import gzip
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_zpp.checkpoint.directory import write_tracker
from megatron_zpp.commands import plot, report
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.config.timing import TimingConfig
from megatron_zpp.data.npy_files import NpyWriter
from megatron_zpp.data.text.open import _entry
from megatron_zpp.reporting.profile import StepProfiler
from megatron_zpp.reporting.sinks import MetricsFile, check_sinks
from megatron_zpp.storage.checksummed_writer import ChecksummedWriter
from megatron_zpp.storage.files import (
    check_writable,
    locked,
    open_named,
    open_shared,
    write_durably,
    write_text,
    write_whole,
)
from tests.support import ROOT, environment


def write_checksummed(path: Path) -> None:
    writer = ChecksummedWriter(path)
    writer.write(b"new")
    writer.finish()
    writer.close()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("file", lambda path: write_durably(path, b"new")),
        ("config.yaml.partial", lambda path: write_text(path.with_name("config.yaml"), "new")),
        ("rank_00000.safetensors", write_checksummed),
        ("report.html", lambda path: write_text(path, "new")),
        ("loss.png.partial", lambda path: write_whole(path.with_name("loss.png"), b"new")),
    ],
)
def test_a_planted_link_is_replaced(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    (shared / name).symlink_to(victim)
    write(shared / name)
    assert victim.read_text() == "mine"
    assert "new" in {path.read_text() for path in shared.iterdir() if not path.is_symlink()}


def test_the_tracker_follows_no_link(tmp_path: Path) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    (shared / "iter_0000003").mkdir(parents=True)
    (shared / "iter_0000003" / "COMMITTED").touch()
    (shared / "latest_checkpointed_iteration.txt.partial").symlink_to(victim)
    write_tracker(shared)
    assert victim.read_text() == "mine"
    assert (shared / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


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


def test_a_probe_follows_no_link(tmp_path: Path) -> None:
    check_writable("--save", str(tmp_path / "new"))
    assert not list(tmp_path.iterdir())


APPENDING = os.O_WRONLY | os.O_APPEND
STRANGER = 12345


def planted(link: Path, target: Path) -> None:
    """A link of another user; root alone can make one."""
    if os.geteuid():
        pytest.skip("only root can make a link of another user")
    link.symlink_to(target)
    os.lchown(link, STRANGER, STRANGER)


def append(path: Path) -> None:
    with os.fdopen(open_named(path, APPENDING), "w") as file:
        file.write("new")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_strangers_link_in_a_shared_directory_is_not_appended_to(
    tmp_path: Path, mode: int, target: str
) -> None:
    (tmp_path / "victim").write_text("mine")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    planted(shared / "metrics.jsonl", tmp_path / target)
    said = f"is a link of user {STRANGER} in a directory that others can write to"
    for write in (
        lambda: append(shared / "metrics.jsonl"),
        lambda: MetricsFile(str(shared / "metrics.jsonl")),
    ):
        with pytest.raises(PermissionError, match=said):
            write()
    with pytest.raises(ValueError, match=f"--metrics-file .*{said}; name another file"):
        check_sinks(LoggingConfig(metrics_file=str(shared / "metrics.jsonl")))
    (shared / "mine").symlink_to("metrics.jsonl")  # a link of the user's that leads there
    with pytest.raises(PermissionError, match=said):
        append(shared / "mine")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_strangers_link_where_only_the_user_writes_is_followed(tmp_path: Path) -> None:
    planted(tmp_path / "metrics.jsonl", tmp_path / "elsewhere")
    append(tmp_path / "metrics.jsonl")
    assert (tmp_path / "elsewhere").read_text() == "new"


@pytest.mark.parametrize("mode", [0o755, 0o1777])
@pytest.mark.parametrize("relative", [True, False])
def test_the_users_own_links_are_followed(tmp_path: Path, mode: int, relative: bool) -> None:
    (tmp_path / "scratch").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "second").symlink_to("../scratch/metrics" if relative else tmp_path / "scratch/metrics")
    (shared / "first").symlink_to("second" if relative else shared / "second")
    check_sinks(LoggingConfig(metrics_file=str(shared / "first")))
    for _ in range(2):
        append(shared / "first")
    assert (tmp_path / "scratch/metrics").read_text() == "newnew"
    assert (shared / "first").is_symlink()


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links") as error:
        append(tmp_path / "a")
    assert error.value.errno == errno.ELOOP


def test_stdout_can_be_named_whatever_it_is(tmp_path: Path) -> None:
    """A pipe, to which no path leads, and a file."""
    code = (
        "from megatron_zpp.reporting.sinks import MetricsFile\n"
        "file = MetricsFile('/dev/stdout')\nfile.write({'iteration': 1}, 0)\nfile.close()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert (done.stdout, done.stderr) == ('{"iteration": 1}\n', "")
    with (tmp_path / "out").open("w") as file:
        subprocess.run(command, stdout=file, check=True, cwd=ROOT, env=environment())
    assert (tmp_path / "out").read_text() == '{"iteration": 1}\n'


@pytest.mark.parametrize("name", ["checksums.json", "x.npy"])
def test_arrays_follow_no_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / name).symlink_to(tmp_path / "victim")
    files = NpyWriter(tmp_path / "arrays")
    files.save("x", np.arange(3))
    files.finish()
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_description_of_cached_tokens_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    entry = _entry(tmp_path / "cache", {"text": "a"})
    (entry / "made_of.json").unlink()
    (entry / "made_of.json").symlink_to(tmp_path / "victim")
    assert _entry(tmp_path / "cache", {"text": "a"}) == entry
    assert (tmp_path / "victim").read_text() == "mine"
    assert stat.S_ISREG((entry / "made_of.json").lstat().st_mode)


@pytest.mark.parametrize(
    ("program", "name"), [(report, "report.html"), (plot, "loss.svg"), (plot, "loss.png")]
)
def test_pages_and_plots_replace_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: object, name: str
) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "lm_loss": 2.0}\n{"iteration": 2, "lm_loss": 1.0}\n'
    )
    (tmp_path / name).symlink_to(tmp_path / "victim")
    argv = ["x", str(tmp_path / "metrics.jsonl"), "--output", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", argv)
    program.main()
    assert (tmp_path / "victim").read_text() == "mine"
    assert stat.S_ISREG((tmp_path / name).lstat().st_mode)


def test_a_trace_replaces_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    trace = tmp_path / "rank0.trace.json.gz"
    trace.symlink_to(tmp_path / "victim")
    config = TimingConfig(profile=True, profile_step_start=1, profile_step_end=2, profile_dir=str(tmp_path))
    profiler = StepProfiler(config, 0, torch.device("cpu"))
    profiler.before_step(1)
    profiler.end(1)
    assert (tmp_path / "victim").read_text() == "mine"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [trace.name, "victim"]
