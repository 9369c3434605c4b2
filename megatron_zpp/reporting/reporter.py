"""Sends lines and records of a run to the console and the sinks, on rank 0 only."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.run import LoggingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import evaluation_line, log_step, print_line, text_lines
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
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Each line is printed inside of `writing()`."""
        self._speaks = topology.rank == 0
        self._iterations, self._writing = iterations, writing
        self.status = 0  # of the run, if it fails; set it before the block is left
        self._sinks: list[ThreadedSink] = []
        if self._speaks:
            self._sinks = open_sinks(logging, config, start, self.say, lambda: self.status)
        self.lost_sinks = False  # known when the block is left

    def say(self, text: str) -> None:
        """A line of text on the console."""
        if self._speaks:
            with self._writing():
                print_line(text)

    def warn(self, text: str) -> None:
        """A line about a problem that does not end the run."""
        self.say(f" WARNING: {text}")

    def log(self, record: Record) -> None:
        """A logged step."""
        if self._speaks:
            with self._writing():
                log_step(record, self._iterations)
        self._write(record)

    def evaluation(self, progress: Progress, split: str, loss: float, *, last: bool) -> None:
        """The result of an evaluation; `last`: of one after the training."""
        record = evaluation_record(progress.iteration, split, loss)
        whose = f" on {'validation' if split == 'valid' else split} set" if last else ""
        self.say(evaluation_line(record, split, f"iteration {progress.iteration}{whose}"))
        self._write(record)

    def texts(self, progress: Progress, texts: Sequence[str]) -> None:
        """The texts that the model wrote, one per prompt."""
        for text in texts:
            for line in text_lines(progress.iteration, text):
                self.say(line)
        record: Record = {"iteration": progress.iteration}
        record |= {"sample" if n == 1 else f"sample_{n}": text for n, text in enumerate(texts, 1)}
        self._write(record)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.status = self.status or int(kind is not None)
        for sink in self._sinks:
            self.lost_sinks |= not sink.close(_PATIENCE)

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)
