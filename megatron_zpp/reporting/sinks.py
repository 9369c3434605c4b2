"""Sinks for the numbers of a run besides the console, independent of one another."""

import fcntl
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.config.values.urls import check_local_directory
from megatron_zpp.reporting.full_disk import FULL
from megatron_zpp.reporting.metrics import Record, finite
from megatron_zpp.storage.files import check_writable, open_named
from megatron_zpp.storage.regular import open_stream

Write = Callable[[Record], object]  # keeps one record, of `record["iteration"]`
Say = Callable[[str], None]  # writes a line to the console
Sink = AbstractContextManager[Write]  # finishes what is being written at the end of a block without an error


@contextmanager
def metrics_file(path: str, say: Say) -> Iterator[Write]:
    """Append one JSON object per line; NaN and Inf become null.

    If the file ends within a line, because an earlier start was killed or its disk was full, that line is
    ended first. A link in place of the file is followed as `open_named` says. A file that was removed is made
    again. What a full disk does not take is written once there is space.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    left, waits = b"", False  # what is to be written, and whether it waits for space
    with suppress(OSError), open_stream(path) as old:  # if there is one, and it can be read
        if old.seek(0, os.SEEK_END) > 0 and old.seek(-1, os.SEEK_END) >= 0 and old.read() != b"\n":
            left = b"\n"
    descriptor = open_named(Path(path), os.O_WRONLY | os.O_APPEND)
    try:  # a lock of this process alone: its workers may outlive it
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        mixed = "another live run writes to it, and nothing tells their records apart"
        say(f" WARNING: --metrics-file {path}: {mixed}; give each run its own file")
    except OSError:
        pass  # a file system without locks

    def flush() -> None:
        nonlocal left, descriptor
        if not os.fstat(descriptor).st_nlink:
            os.close(descriptor)
            descriptor = open_named(Path(path), os.O_WRONLY | os.O_APPEND)
        while left:
            left = left[os.write(descriptor, left) :]

    def write(record: Record) -> None:
        nonlocal left, waits
        left += json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        try:
            flush()
            waits = False
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not waits:
                say(f" WARNING: --metrics-file {path}: {error.strerror}; records wait until there is space")
            waits = True

    yield write
    flush()
    os.close(descriptor)


# Megatron-LM's tags of numbers, by our names.
MEGATRON_TAGS = {
    "lm_loss": "lm loss",
    "learning_rate": "learning-rate",
    "global_batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "grad_norm": "grad-norm",
    "params_norm": "params-norm",
    "valid_loss": "lm loss validation",
    "valid_perplexity": "lm loss validation ppl",
    "test_loss": "lm loss test",
    "test_perplexity": "lm loss test ppl",
    "elapsed_ms": "iteration-time",
    "tflops_per_gpu": "throughput",
    "memory_allocated_bytes": "mem-allocated-bytes",
    "memory_peak_bytes": "mem-max-allocated-bytes",
}
WANDB_TAGS = MEGATRON_TAGS | {"consumed_samples": "samples vs steps"}  # in Megatron-LM W&B alone gets it


@contextmanager
def tensorboard(directory: str, start: Progress, say: Say) -> Iterator[Write]:
    """Scalars of TensorBoard event files, under Megatron-LM's tags where it has the same number.

    Records of earlier starts after `start` are hidden; all of them if the run begins at iteration 0.
    """
    from torch.utils.tensorboard import SummaryWriter

    if not start.iteration and any(Path(directory).glob("events.out.tfevents.*")):
        hidden = "the run begins at iteration 0, which hides the earlier curves there"
        say(f" WARNING: --tensorboard-dir {directory}: {hidden}; give another run another directory")
    writer = SummaryWriter(directory, purge_step=start.iteration + 1 if start.iteration else 0)

    def write(record: Record) -> None:
        for name, value in tagged(record).items():
            if isinstance(value, str):
                writer.add_text(name, value, record["iteration"])
            elif name != "iteration" and value is not None:
                writer.add_scalar(name, value, record["iteration"])

    yield write
    writer.close()


@contextmanager
def weights_and_biases(
    logging: LoggingConfig, config: dict[str, Any], start: Progress, status: Callable[[], int]
) -> Iterator[Write]:
    """A Weights & Biases run: the same one for all starts of a run, unless WANDB_RUN_ID names another.

    Names are Megatron-LM's where it has the same number, as TensorBoard's are. Offline each start records a
    piece in a directory of its own. W&B shows the run as failed unless `status()` is 0 at its end.
    """
    import wandb

    if logging.wandb_save_dir:
        Path(logging.wandb_save_dir).mkdir(parents=True, exist_ok=True)  # or W&B takes another
    mode = os.environ.get("WANDB_MODE")
    run = wandb.init(
        project=logging.wandb_project,
        name=logging.wandb_exp_name,
        entity=logging.wandb_entity,
        dir=logging.wandb_save_dir,
        config=config,
        id=os.environ.get("WANDB_RUN_ID", start.run),
        resume=None if mode == "offline" else "allow",  # offline there is no server to ask
        # W&B's last line would name a command that uploads the piece of this start alone, from step 0.
        settings=wandb.Settings(quiet=True) if mode == "offline" else None,
    )
    # W&B's own steps never decrease; iterations do if a run resumes from an earlier checkpoint.
    run.define_metric("*", step_metric="iteration")
    yield lambda record: run.log(tagged(record, WANDB_TAGS))
    run.finish(exit_code=status())


def tagged(record: Record, tags: Mapping[str, str] = MEGATRON_TAGS) -> Record:
    """A record under Megatron-LM's tags, whose iteration-time is in seconds; others keep their names."""
    in_seconds = {"elapsed_ms": record["elapsed_ms"] / 1000} if "elapsed_ms" in record else {}
    return {tags.get(name, name): value for name, value in (record | in_seconds).items()}


class ThreadedSink:
    """A sink in its own thread: a sink that fails or hangs loses its records and does not affect the run.

    `make` opens the sink in that thread. `say` gets one line with `name` if the sink is lost.
    """

    def __init__(self, name: str, make: Callable[[], Sink], say: Say) -> None:
        self._name, self._make, self._say = name, make, say
        # Tiny steps, each logged, fill it in minutes, and W&B may take 90 s to begin; a record has 2 kB.
        self._queue: queue.Queue[Record | None] = queue.Queue(maxsize=20_000)
        self._lost = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hand one record to the thread, without waiting."""
        if self._lost:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose("it has not taken a record for a long time")

    def close(self, seconds: float) -> bool:
        """Finish writing within `seconds`. False if the sink is lost, now or earlier.

        The exit handlers of a lost sink may fail or hang as well.
        """
        if not self._lost:
            deadline = time.monotonic() + seconds
            with suppress(queue.Full):  # behind a record that takes all of the time
                self._queue.put(None, timeout=seconds)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._lose(f"it did not finish within {seconds:g} s")
        return not self._lost

    def _work(self) -> None:
        try:
            with self._make() as write:
                while (record := self._queue.get()) is not None:
                    write(record)
        except Exception as error:
            self._lose(one_line(error))

    def _lose(self, why: str) -> None:
        self._lost = True
        self._say(f" WARNING: {self._name} is lost, and the run continues without it: {why}")


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of its name, such as ./wandb of offline runs, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def check_sinks(logging: LoggingConfig, *, runs: bool = True) -> None:
    """Raise ValueError, before anything is built, for a flag that cannot be obeyed.

    Its place cannot be written, or its package is missing, which a plan does not need: `runs` is False.
    """
    for flag, value, package in (
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
    ):
        if runs and value and not _is_installed(package):
            raise option_error(flag, value, f"needs the package {package}; install it: pip install {package}")
    if logging.tensorboard_dir:
        check_local_directory("--tensorboard-dir", logging.tensorboard_dir)
    if logging.wandb_save_dir:
        check_local_directory("--wandb-save-dir", logging.wandb_save_dir)
    if logging.metrics_file:
        path = Path(logging.metrics_file)
        if path.is_dir():
            raise option_error("--metrics-file", path, "is a directory; name a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise option_error(
                "--metrics-file", path, "cannot be written; check its permissions or name another"
            )
        check_writable("--metrics-file", str(path.parent))
        if path.is_symlink():
            try:
                os.close(open_named(path, os.O_WRONLY | os.O_APPEND))
            except OSError as error:
                raise option_error("--metrics-file", path, f"{one_line(error)}; name another file") from None


def open_sinks(
    logging: LoggingConfig, config: dict[str, Any], start: Progress, say: Say, status: Callable[[], int]
) -> list[ThreadedSink]:
    """The sinks that the flags ask for, of a run that starts at `start`; call it on one rank only."""
    sinks: dict[str, Callable[[], Sink]] = {}
    if logging.metrics_file:
        sinks["--metrics-file"] = partial(metrics_file, logging.metrics_file, say)
    if logging.tensorboard_dir:
        sinks["TensorBoard"] = partial(tensorboard, logging.tensorboard_dir, start, say)
    if logging.wandb_project:
        sinks["W&B"] = partial(weights_and_biases, logging, config, start, status)
    return [ThreadedSink(name, make, say) for name, make in sinks.items()]
