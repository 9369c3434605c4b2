"""Links that another user has planted in a shared directory are not followed by what is written there."""

import errno
import os
import stat
import subprocess
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
)
from tests.support import ROOT, environment


def write_checksummed(shared: Path) -> None:
    writer = ChecksummedWriter(shared / "rank_00000.safetensors")
    writer.write(b"new")
    writer.finish()
    writer.close()


def write_the_tracker(shared: Path) -> None:
    (shared / "iter_0000003").mkdir()
    (shared / "iter_0000003" / "COMMITTED").touch()
    write_tracker(shared)


def write_arrays(shared: Path) -> None:
    files = NpyWriter(shared)
    files.save("x", np.arange(3))
    files.finish()


def write_a_trace(shared: Path) -> None:
    config = TimingConfig(profile=True, profile_step_start=1, profile_step_end=2, profile_dir=str(shared))
    profiler = StepProfiler(config, 0, torch.device("cpu"))
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
        ("checksums.json", "checksums.json", write_arrays),
        ("x.npy", "x.npy", write_arrays),
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
        "import os\nfrom pathlib import Path\nfrom megatron_zpp.storage.files import open_named\n"
        "os.write(open_named(Path('/dev/stdout'), os.O_WRONLY | os.O_APPEND), b'new\\n')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert (done.stdout, done.stderr) == ("new\n", "")
    with (tmp_path / "out").open("w") as file:
        subprocess.run(command, stdout=file, check=True, cwd=ROOT, env=environment())
    assert (tmp_path / "out").read_text() == "new\n"


def test_the_description_of_cached_tokens_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    entry = _entry(tmp_path / "cache", {"text": "a"})
    (entry / "made_of.json").unlink()
    (entry / "made_of.json").symlink_to(tmp_path / "victim")
    assert _entry(tmp_path / "cache", {"text": "a"}) == entry
    assert (tmp_path / "victim").read_text() == "mine"
    assert stat.S_ISREG((entry / "made_of.json").lstat().st_mode)
