"""TensorBoard's tags and axes, and an offline W&B run of several starts as `wandb sync` uploads it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.reporting.metrics import Record
from megatron_zpp.reporting.sinks import (
    BY_SAMPLES,
    MEGATRON_TAGS,
    TensorBoard,
    ThreadedSink,
    check_sinks,
    wandb_record,
)
from megatron_zpp.storage.files import check_replaceable
from tests.reporting.test_curves import step
from tests.reporting.wandb_server import wandb_server
from tests.support import environment, run

NEEDS_SYNC = pytest.mark.skipif(
    tuple(map(int, version("wandb").split(".")[:2])) < (0, 31), reason="the `wandb sync` of 0.31 or later"
)
RECORD_PIECE = """
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.reporting.sinks import WandB
logging = LoggingConfig(wandb_project="p", wandb_mode="offline", wandb_save_dir={directory!r})
sink = WandB(logging, {{}}, Progress(run="run12345"), print)
for iteration in range({first}, {last} + 1):
    sink.write({{"iteration": iteration, "lm_loss": 10.0 / iteration}}, iteration)
sink.close()
"""


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tags_are_megatrons_and_units_too(tmp_path: Path) -> None:
    """The names are those of add_scalar in Megatron-LM's training.py; other numbers keep their names."""
    sink = TensorBoard(str(tmp_path), Progress())
    sink.write(
        {**step(5, 3.5), "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0, "inter_node_bytes": 7},
        20,
    )
    sink.write({"iteration": 5, "valid_loss": 3.0, "valid_perplexity": 20.0}, 20)
    sink.write({"iteration": 5, "params_norm": 1.5}, 20)
    sink.close()
    for tag, value in (
        ("lm loss", 3.5),
        ("grad-norm", 0.5),
        ("learning-rate", 1e-3),
        ("loss-scale", 1.0),
        ("batch-size", 4.0),
        ("params-norm", 1.5),
        ("lm loss validation", 3.0),
        ("lm loss validation ppl", 20.0),
    ):
        assert scalars(tmp_path, tag) == [(5, pytest.approx(value))]
        assert scalars(tmp_path / BY_SAMPLES, f"{tag} vs samples") == [(20, pytest.approx(value))]
    assert scalars(tmp_path, "iteration-time") == [(5, 2.0)]  # seconds
    assert scalars(tmp_path, "inter_node_bytes") == [(5, 7.0)]
    assert scalars(tmp_path, "tokens_per_second") == [(5, 32.0)]
    assert len({tag.name for tag in MEGATRON_TAGS.values()}) == len(MEGATRON_TAGS)


def test_wandb_gets_megatrons_names() -> None:
    """Those of wandb_writer.log in Megatron-LM's training.py; other numbers keep their names."""
    logged = wandb_record(
        {**step(5, 3.5), "grad_norm": 0.5, "learning_rate": 1e-3, "loss_scale": 1.0}
        | {"consumed_samples": 20, "params_norm": 1.5, "tflops_per_gpu": 7.0}
        | {"mfu": None, "skipped": 1, "memory_allocated_bytes": 2**60 + 1}
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
    evaluated = wandb_record({"iteration": 5, "valid_loss": 3.0, "valid_perplexity": 20.0})
    assert evaluated == {"iteration": 5, "lm loss validation": 3.0, "lm loss validation ppl": 20.0}


def test_a_step_back_hides_later_values_on_both_axes(tmp_path: Path) -> None:
    """Samples are more than iterations: one directory for both would hide all earlier curves by samples."""
    first = TensorBoard(str(tmp_path), Progress())
    for iteration in range(1, 5):
        first.write(step(iteration, 10.0 + iteration), 4 * iteration)
    first.close()
    second = TensorBoard(str(tmp_path), Progress(iteration=2, consumed_samples=8))
    for iteration in range(3, 6):
        second.write(step(iteration, 20.0 + iteration), 4 * iteration)
    second.close()
    expected = [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert scalars(tmp_path, "lm loss") == expected
    by_samples = [(4 * iteration, value) for iteration, value in expected]
    assert scalars(tmp_path / BY_SAMPLES, "lm loss vs samples") == by_samples


@pytest.mark.nightly
@NEEDS_SYNC
def test_the_pieces_of_an_offline_wandb_run_are_uploaded_as_one(tmp_path: Path) -> None:
    """By the command that every start prints: history is appended, and W&B's steps increase.

    The second start resumes from an earlier checkpoint; the first piece has been uploaded before.
    """
    commands = []
    with wandb_server() as server:
        for first, last in ((1, 4), (3, 6)):
            done = run("-c", RECORD_PIECE.format(directory=str(tmp_path), first=first, last=last))
            assert done.returncode == 0, done.stderr
            (line,) = (line for line in done.stdout.splitlines() if "recorded offline" in line)
            commands.append(line.partition("to upload it later: ")[2])
            assert "You can sync this run" not in done.stdout + done.stderr  # W&B's command for one piece
            sync(commands[-1], server.url)
    assert commands[0] == commands[1]
    assert commands[0].startswith(f"WANDB_RESUME=allow wandb sync {tmp_path}/wandb/offline-run-*-run12345")
    assert len(list(tmp_path.glob("wandb/offline-run-*-run12345"))) == 2
    assert [line["iteration"] for line in server.history] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert [line["lm loss"] for line in server.history] == [10.0 / i for i in (1, 2, 3, 4, 3, 4, 5, 6)]
    assert [line["_step"] for line in server.history] == list(range(8))
    assert server.offsets == [0, 4]


@pytest.mark.nightly
@NEEDS_SYNC
def test_pieces_that_are_uploaded_together_are_appended_in_their_order(tmp_path: Path) -> None:
    for first, last in ((1, 2), (3, 5)):
        done = run("-c", RECORD_PIECE.format(directory=str(tmp_path), first=first, last=last))
        assert done.returncode == 0, done.stderr
    command = done.stdout.partition("to upload it later: ")[2].strip()
    with wandb_server() as server:
        sync(command, server.url)
    assert [(line["_step"], line["iteration"]) for line in server.history] == list(
        zip(range(5), range(1, 6), strict=True)
    )


def sync(command: str, url: str) -> None:
    """Runs the command as a user would, against another server."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment(WANDB_BASE_URL=url, WANDB_API_KEY="0123456789" * 4, PATH=path)
    done = subprocess.run(
        command, shell=True, env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


class Hanging:
    """A sink that hangs with its first record until `over`."""

    def __init__(self, begun: threading.Event, over: threading.Event) -> None:
        self._begun, self._over = begun, over

    def write(self, record: Record, samples: int) -> None:
        self._begun.set()
        self._over.wait(60)

    def close(self) -> None: ...


@pytest.mark.parametrize("waiting", [0, 999, 1000, 1001])
def test_a_sink_that_hangs_is_abandoned_however_many_records_wait(waiting: int) -> None:
    """Also when its queue, of 1,000 records, has no place for the request to end."""
    begun, over, said = threading.Event(), threading.Event(), []
    sink = ThreadedSink("W&B", lambda: Hanging(begun, over), said.append)
    sink.write({"iteration": 0}, 0)
    assert begun.wait(60)
    for iteration in range(waiting):
        sink.write({"iteration": iteration}, 0)
    closing = threading.Thread(target=lambda: said.append(str(sink.close(0.1))), daemon=True)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    over.set()
    assert ended
    *_, lost, closed = said
    assert closed == "False"
    assert "W&B is lost, and the run continues without it" in lost


@pytest.mark.parametrize(
    ("flag", "check"),
    [
        ("--tensorboard-dir", lambda url: check_sinks(LoggingConfig(tensorboard_dir=url))),
        ("--wandb-save-dir", lambda url: check_sinks(LoggingConfig(wandb_project="p", wandb_save_dir=url))),
        ("--output", lambda url: check_replaceable("--output", url)),
    ],
)
def test_a_url_is_refused_where_only_a_path_can_be_written(
    flag: str, check: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a directory `s3:` below the current one, and TensorBoard would write half of it to S3."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{flag} s3://bucket/key: is a URL; give a path of this machine"):
        check("s3://bucket/key")
    assert list(tmp_path.iterdir()) == []
