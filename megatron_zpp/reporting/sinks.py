"""Sinks for the numbers of a run besides the console, independent of one another."""

import json
import math
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.reporting.metrics import Record
from megatron_zpp.storage.files import check_writable


class Sink(Protocol):
    """Takes records of one iteration each."""

    def write(self, record: Record) -> None:
        """Keep one record; `record["iteration"]` is its position on the curve."""

    def close(self) -> None:
        """Finish what is being written."""


class MetricsFile:
    """Appends one JSON object per line; NaN and Inf become null, because JSON has neither."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - a line is on disk when it is written

    def write(self, record: Record) -> None:
        """Append one line."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(values, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars of a TensorBoard event file."""

    def __init__(self, directory: str, start: Progress) -> None:
        """Records of earlier starts after `start` are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=start.iteration + 1 if start.iteration else None)

    def write(self, record: Record) -> None:
        """Add one point to the curve of every number."""
        for name, value in record.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, record["iteration"])
            elif name != "iteration" and value is not None:
                self._writer.add_scalar(name, value, record["iteration"])

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandB:
    """A Weights & Biases run: the same one for all starts of a run, unless WANDB_RUN_ID names another."""

    def __init__(self, logging: LoggingConfig, config: dict[str, Any], start: Progress) -> None:
        import wandb

        if logging.wandb_save_dir:
            Path(logging.wandb_save_dir).mkdir(parents=True, exist_ok=True)  # or W&B takes another
        mode = logging.wandb_mode or os.environ.get("WANDB_MODE")
        self._run = wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            entity=logging.wandb_entity,
            dir=logging.wandb_save_dir,
            mode=logging.wandb_mode,
            config=config,
            id=os.environ.get("WANDB_RUN_ID", start.run),
            resume=None
            if mode == "offline"
            else "allow",  # offline there is nothing to ask; the id joins them
        )
        # W&B's own steps never decrease; iterations do if a run resumes from an earlier checkpoint.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, record: Record) -> None:
        """Log one record; its iteration is the axis of all curves."""
        self._run.log(record)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class ThreadedSink:
    """A sink in its own thread: a sink that fails or hangs loses its records and does not affect the run.

    `make` opens the sink in that thread. `say` gets one line with `name` if the sink is lost.
    """

    def __init__(self, name: str, make: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name, self._make, self._say = name, make, say
        self._queue: queue.Queue[Record | None] = queue.Queue(maxsize=1000)
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
            self._queue.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._lose(f"it did not finish within {seconds:g} s")
        return not self._lost

    def _work(self) -> None:
        try:
            sink = self._make()
            while (record := self._queue.get()) is not None:
                sink.write(record)
            sink.close()
        except Exception as error:
            self._lose(one_line(error))

    def _lose(self, why: str) -> None:
        self._lost = True
        self._say(f" WARNING: {self._name} is lost, and the run continues without it: {why}")


def check_sinks(logging: LoggingConfig) -> None:
    """Raise ValueError, before anything is built, for a flag that names a place that cannot be written."""
    if logging.tensorboard_dir:
        check_writable("--tensorboard-dir", logging.tensorboard_dir)
    if logging.wandb_save_dir:
        check_writable("--wandb-save-dir", logging.wandb_save_dir)
    if logging.metrics_file:
        path = Path(logging.metrics_file)
        if path.is_dir():
            raise option_error("--metrics-file", path, "is a directory; name a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise option_error(
                "--metrics-file", path, "cannot be written; check its permissions or name another"
            )
        check_writable("--metrics-file", str(path.parent))


def open_sinks(
    logging: LoggingConfig, config: dict[str, Any], start: Progress, say: Callable[[str], None]
) -> list[ThreadedSink]:
    """The sinks that the flags ask for, of a run that starts at `start`; call it on one rank only."""
    sinks: dict[str, Callable[[], Sink]] = {}
    if logging.metrics_file:
        sinks["--metrics-file"] = partial(MetricsFile, logging.metrics_file)
    if logging.tensorboard_dir:
        sinks["TensorBoard"] = partial(TensorBoard, logging.tensorboard_dir, start)
    if logging.wandb_project:
        sinks["W&B"] = lambda: WandB(logging, config, start)
    return [ThreadedSink(name, make, say) for name, make in sinks.items()]
