"""TensorBoard's tags and axes, W&B's names, and a sink that hangs."""

import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.reporter import Reporter
from megatron_zpp.reporting.sinks import (
    MEGATRON_TAGS,
    WANDB_TAGS,
    ThreadedSink,
    Write,
    check_sinks,
    metrics_file,
    tagged,
    tensorboard,
)
from tests.reporting.test_curves import step
from tests.support import forked


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_a_curve_of_each_number_and_text(tmp_path: Path) -> None:
    with tensorboard(str(tmp_path), Progress(), print) as write:
        write({**step(5, 3.5), "inter_node_bytes": 7})
    assert scalars(tmp_path, "lm loss") == [(5, 3.5)]
    assert scalars(tmp_path, "iteration-time") == [(5, 2.0)]  # seconds
    assert scalars(tmp_path, "consumed_samples") == [(5, 20.0)]
    assert scalars(tmp_path, "inter_node_bytes") == [(5, 7.0)]


def test_names_are_megatrons() -> None:
    """Those of wandb_writer.log and add_scalar in its training.py; other numbers keep their names."""
    logged = tagged(
        {**step(5, 3.5), "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0}
        | {"consumed_samples": 20, "params_norm": 1.5, "tflops_per_gpu": 7.0}
        | {"mfu": None, "skipped": 1, "memory_allocated_bytes": 2**60 + 1},
        WANDB_TAGS,
    )
    theirs = {
        "samples vs steps": 20,
        "learning-rate": 1e-3,
        "batch-size": 4,
        "lm loss": 3.5,
        "loss-scale": 1.0,
        "grad-norm": 0.5,
        "params-norm": 1.5,
        "iteration-time": 2.0,  # seconds
        "throughput": 7.0,
    }
    ours = {"iteration": 5, "tokens_per_second": 32.0, "mfu": None, "skipped": 1, "sample": "text"}
    assert logged == theirs | ours | {"mem-allocated-bytes": 2**60 + 1}
    evaluated = tagged({"iteration": 5, "valid_loss": 3.0, "valid_perplexity": 20.0})
    assert evaluated == {"iteration": 5, "lm loss validation": 3.0, "lm loss validation ppl": 20.0}
    assert len(set(MEGATRON_TAGS.values())) == len(MEGATRON_TAGS)


def test_a_step_back_hides_later_values(tmp_path: Path) -> None:
    said: list[str] = []
    with tensorboard(str(tmp_path), Progress(), said.append) as write:
        for iteration in range(1, 5):
            write(step(iteration, 10.0 + iteration))
    with tensorboard(str(tmp_path), Progress(iteration=2, consumed_samples=8), said.append) as write:
        for iteration in range(3, 6):
            write(step(iteration, 20.0 + iteration))
    expected = [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert scalars(tmp_path, "lm loss") == expected
    assert not said
    with tensorboard(str(tmp_path), Progress(), said.append) as write:  # another run, or one without a save
        write(step(1, 31.0))
    assert scalars(tmp_path, "lm loss") == [(1, 31.0)]
    assert "begins at iteration 0, which hides the earlier curves there" in said[0]


def test_a_disk_that_stays_full_loses_records_and_says_so() -> None:
    said: list[str] = []
    sink = ThreadedSink("--metrics-file", lambda: metrics_file("/dev/full", said.append), said.append)
    sink.write({"iteration": 1})
    assert not sink.close(60)
    full = " WARNING: --metrics-file /dev/full: No space left on device; records wait until there is space"
    lost = " WARNING: --metrics-file is lost, and the run continues without it: "
    assert said == [full, f"{lost}OSError: [Errno 28] No space left on device"]


def test_a_disk_that_was_full_has_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a part of the second; the third comes once there is space."""
    file, said, write, room = tmp_path / "metrics.jsonl", [], os.write, [25]

    def until_full(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= (written := write(descriptor, data[: room[0]]))
        return written

    with metrics_file(str(file), said.append) as record:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", until_full)
            record({"iteration": 1})
            record({"iteration": 2})
        record({"iteration": 3})
    assert [json.loads(line)["iteration"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert len(said) == 1


def test_a_sink_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run, which would have no curves; a plan needs none. Folders of these names do not count."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for package in ("tensorboard", "wandb"):
        (tmp_path / package).mkdir()
        monkeypatch.delitem(sys.modules, package, raising=False)
    for logging in (LoggingConfig(tensorboard_dir=str(tmp_path)), LoggingConfig(wandb_project="p")):
        check_sinks(logging, runs=False)
        with pytest.raises(ValueError, match=r"^--(tensorboard-dir|wandb-project) .*: pip install \w+$"):
            check_sinks(logging)
    check_sinks(LoggingConfig(metrics_file=str(tmp_path / "metrics.jsonl")))


def opened(file: str) -> None:
    metrics_file(file, print).__enter__()


def test_two_live_runs_with_one_file_are_told(tmp_path: Path) -> None:
    file, said = str(tmp_path / "metrics.jsonl"), []
    for name, live in (("alone", nullcontext()), ("beside", metrics_file(file, print))):
        (tmp_path / name).touch()
        with live:
            forked(opened, file, stdout=tmp_path / name)
        said.append((tmp_path / name).read_text())
    assert said[0] == ""
    assert "another live run writes to it" in said[1]


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with metrics_file(str(file), print) as write:
        write({"iteration": 1})
        file.unlink()
        write({"iteration": 2})
    assert json.loads(file.read_text()) == {"iteration": 2}


@pytest.mark.parametrize(("status", "raises", "shown"), [(0, False, 0), (3, False, 3), (0, True, 1)])
def test_wandb_shows_a_run_that_fails_as_failed(
    status: int, raises: bool, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline it ends without W&B's own lines: their command uploads one start of a run."""
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    logging = LoggingConfig(wandb_project="p")
    with suppress(KeyError), Reporter(logging, {}, Topology(), iterations=1, start=Progress()) as reporter:
        reporter.status = status
        if raises:
            raise KeyError
    wandb.init.return_value.finish.assert_called_once_with(exit_code=shown)
    wandb.Settings.assert_called_once_with(quiet=True)


@contextmanager
def hanging(begun: threading.Event, over: threading.Event) -> Iterator[Write]:
    """A sink that hangs with its first record until `over`."""
    yield lambda record: begun.set() or over.wait(60)


@pytest.mark.parametrize("waiting", [0, 1001, 19_999, 20_000, 20_001])
def test_a_sink_that_hangs_is_abandoned_however_many_records_wait(waiting: int) -> None:
    """Also when its queue, of 20,000 records, has no place for the request to end."""
    begun, over, said = threading.Event(), threading.Event(), []
    sink = ThreadedSink("W&B", lambda: hanging(begun, over), said.append)
    sink.write({"iteration": 0})
    assert begun.wait(60)
    for iteration in range(waiting):
        sink.write({"iteration": iteration})
    assert bool(said) == (waiting > 20_000)  # a slow begin loses nothing
    closing = threading.Thread(target=lambda: said.append(str(sink.close(0.1))), daemon=True)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    over.set()
    assert ended
    *_, lost, closed = said
    assert closed == "False"
    assert "W&B is lost, and the run continues without it" in lost
