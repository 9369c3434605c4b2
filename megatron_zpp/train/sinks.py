"""Where the numbers of a run go beside the console. Each sink is independent of the others."""

import json
import math
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import refusal
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.storage.files import check_writable
from megatron_zpp.train.metrics import Record


class Sink(Protocol):
    """Takes records of one iteration each."""

    def write(self, record: Record) -> None:
        """Keeps one record; `record["iteration"]` is its place on the curve."""

    def close(self) -> None:
        """Finishes what is being written."""


class MetricsFile:
    """One JSON object a line, appended; a number that is not finite is null, since JSON has none."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - a line is on disk when it is written

    def write(self, record: Record) -> None:
        """Appends one line."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(values, allow_nan=False) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Scalars of a TensorBoard event file."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory)

    def write(self, record: Record) -> None:
        """Adds one point to the curve of every number."""
        for name, value in record.items():
            if name != "iteration" and value is not None:
                self._writer.add_scalar(name, value, record["iteration"])

    def close(self) -> None:
        """Flushes the event file."""
        self._writer.close()


class WandB:
    """A Weights & Biases run."""

    def __init__(self, logging: LoggingConfig, config: dict[str, Any]) -> None:
        import wandb

        if logging.wandb_save_dir:
            Path(logging.wandb_save_dir).mkdir(parents=True, exist_ok=True)  # or W&B takes another
        self._run = wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            entity=logging.wandb_entity,
            dir=logging.wandb_save_dir,
            mode=logging.wandb_mode,
            config=config,
        )

    def write(self, record: Record) -> None:
        """Logs one record at its iteration."""
        self._run.log(record, step=record["iteration"])

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class Beside:
    """A sink in a thread of its own: one that fails or hangs costs its own records, and never the run.

    `name` is what `say` calls it in the one line about its end.
    """

    def __init__(self, name: str, sink: Sink, say: Callable[[str], None]) -> None:
        self._name, self._sink, self._say = name, sink, say
        self._queue: queue.Queue[Record | None] = queue.Queue(maxsize=1000)
        self._lost = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Hands one record over, and never waits."""
        if self._lost:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose("it has not taken a record for a long time")

    def close(self, seconds: float) -> bool:
        """Finishes what is being written, within `seconds`; False for a sink that is lost, now or before.

        What such a one has left to be done when Python exits may fail or hang as well.
        """
        if not self._lost:
            self._queue.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._lose(f"it did not finish within {seconds:g} s")
        return not self._lost

    def _work(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                self._sink.write(record)
            self._sink.close()
        except Exception as error:
            self._lose(one_line(error))

    def _lose(self, why: str) -> None:
        self._lost = True
        self._say(f" WARNING: {self._name} is lost, and the run goes on without it: {why}")


def check_sinks(logging: LoggingConfig) -> None:
    """Refuses, before anything is built, places that cannot be written. Raises ValueError naming the flag."""
    if logging.tensorboard_dir:
        check_writable("--tensorboard-dir", logging.tensorboard_dir)
    if logging.wandb_save_dir:
        check_writable("--wandb-save-dir", logging.wandb_save_dir)
    if logging.metrics_file:
        path = Path(logging.metrics_file)
        if path.is_dir():
            raise refusal("--metrics-file", path, "is a directory; name a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise refusal("--metrics-file", path, "cannot be written; check its permissions or name another")
        check_writable("--metrics-file", str(path.parent))


def open_sinks(logging: LoggingConfig, config: dict[str, Any], say: Callable[[str], None]) -> list[Beside]:
    """The sinks that the flags ask for; called on one rank only."""
    sinks: dict[str, Sink] = {}
    if logging.metrics_file:
        sinks["--metrics-file"] = MetricsFile(logging.metrics_file)
    if logging.tensorboard_dir:
        sinks["TensorBoard"] = TensorBoard(logging.tensorboard_dir)
    if logging.wandb_project:
        sinks["W&B"] = WandB(logging, config)
    return [Beside(name, sink, say) for name, sink in sinks.items()]
