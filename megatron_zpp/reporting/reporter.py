"""Sends lines and records of a run to the console and the sinks, on rank 0 only."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import Console
from megatron_zpp.reporting.metrics import NewestLoss, Record, evaluation_record, number
from megatron_zpp.reporting.sinks import ThreadedSink, open_sinks

_PATIENCE = 30.0  # seconds that each sink gets to finish at the end


class Reporter:
    """The only output of a run. Use it in a `with` block."""

    def __init__(
        self,
        logging: LoggingConfig,
        config: dict[str, Any],
        topology: Topology,
        *,
        iterations: int,
        start: Progress,
        device: torch.device,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Each line is printed inside of `writing()`."""
        speaks = topology.rank == 0
        on_gpu = speaks and device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
        self._console = Console(iterations, start.iteration, memory, writing) if speaks else None
        self._newest = NewestLoss(device) if self._console and self._console.has_bar else None
        self._whose = " on rank 0" if topology.world_size > 1 else ""
        self._sinks: list[ThreadedSink] = open_sinks(logging, config, start, self.say) if speaks else []
        self.lost_sinks = False  # known when the block is left

    def say(self, text: str) -> None:
        """A line of text on the console."""
        if self._console:
            self._console.say(text)

    def warn(self, text: str) -> None:
        """A line about a problem that does not end the run."""
        self.say(f" WARNING: {text}")

    def step_done(self, loss: Tensor) -> None:
        """One more iteration; `loss` is this rank's, which a bar shows as soon as the device has it."""
        if self._console:
            newest = self._newest.after(loss) if self._newest else None
            self._console.step_done("" if newest is None else f"loss {newest:.4f}{self._whose}")

    def log(self, record: Record) -> None:
        """A logged step."""
        if self._console:
            self._console.log(record)
        self._write(record, int(number(record, "consumed_samples")))

    def evaluation(self, progress: Progress, split: str, loss: float, *, last: bool) -> None:
        """The result of an evaluation; `last`: of one after the training."""
        record = evaluation_record(progress.iteration, split, loss)
        if self._console:
            name = {"valid": "validation", "test": "test"}[split]
            whose = f" on {name} set" if last else ""
            self._console.evaluation(record, split, f"iteration {progress.iteration}{whose}")
        self._write(record, progress.consumed_samples)

    def text(self, progress: Progress, text: str) -> None:
        """A text that the model wrote."""
        self.say(f" text at iteration {progress.iteration} | {text!r} |")
        self._write({"iteration": progress.iteration, "sample": text}, progress.consumed_samples)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception: object) -> None:
        for sink in self._sinks:
            self.lost_sinks |= not sink.close(_PATIENCE)
        if self._console:
            self._console.close()

    def _write(self, record: Record, samples: int) -> None:
        for sink in self._sinks:
            sink.write(record, samples)
