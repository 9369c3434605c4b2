"""Sends lines and records of a run to the console and the sinks, on rank 0 only."""

from typing import Any

from megatron_zpp.checkpoint.states import Progress
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import Console
from megatron_zpp.reporting.metrics import Record, evaluation_record
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
    ) -> None:
        speaks = topology.rank == 0
        self._console = Console(iterations, start.iteration) if speaks else None
        self._sinks: list[ThreadedSink] = open_sinks(logging, config, start, self.say) if speaks else []
        self.lost_sinks = False  # known when the block is left

    def say(self, text: str) -> None:
        """A line of text on the console."""
        if self._console:
            self._console.say(text)

    def warn(self, text: str) -> None:
        """A line about a problem that does not end the run."""
        self.say(f" WARNING: {text}")

    def step_done(self) -> None:
        """One more iteration."""
        if self._console:
            self._console.step_done()

    def log(self, record: Record) -> None:
        """A logged step."""
        if self._console:
            self._console.log(record)
        self._write(record)

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """The result of an evaluation."""
        record = evaluation_record(iteration, split, loss)
        if self._console:
            self._console.evaluation(record, split, f"iteration {iteration}")
        self._write(record)

    def text(self, iteration: int, text: str) -> None:
        """A text that the model wrote."""
        self.say(f" text at iteration {iteration} | {text!r} |")
        self._write({"iteration": iteration, "sample": text})

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception: object) -> None:
        for sink in self._sinks:
            self.lost_sinks |= not sink.close(_PATIENCE)
        if self._console:
            self._console.close()

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)
