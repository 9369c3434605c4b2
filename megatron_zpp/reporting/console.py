"""All that a run prints: its head, Megatron's log line and, on a terminal, a progress bar."""

import datetime
import errno
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from tqdm import tqdm

from megatron_zpp.config.colour import paint_log_line, paint_message, wants_colour
from megatron_zpp.config.options import printable
from megatron_zpp.reporting.metrics import Record, number


def tell(prog: str, line: str) -> None:
    """Write a line to stderr about slow work."""
    with tqdm.external_write_mode(file=sys.stderr):
        print(_message(f"{prog}: {line}"), file=sys.stderr, flush=True)


def warn(prog: str, rank: int, notes: Sequence[str]) -> None:
    """Write each note on the command line to stderr; only rank 0 does."""
    if rank == 0:
        for note in notes:
            print(_message(f"{prog}: warning: {note}"), file=sys.stderr, flush=True)


def _message(line: str) -> str:
    line = printable(line)
    return paint_message(line) if wants_colour(sys.stderr.isatty()) else line


class Console:
    """Prints for one rank. On a terminal lines have colours, and a bar below them shows the run at a glance.

    `gpu_bytes` is the memory of this rank's GPU, None on a CPU. Each line is printed inside of `writing()`.
    """

    def __init__(
        self,
        iterations: int,
        done: int,
        gpu_bytes: int | None = None,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._iterations, self._gpu_bytes, self._writing = iterations, gpu_bytes, writing
        self._colour = wants_colour(sys.stdout.isatty())
        self._loss, self._glance = "", ""
        self._bar = tqdm(
            total=iterations,
            initial=done,
            unit="it",
            desc="training",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format="{l_bar}{bar:16}{r_bar}",  # leaves room for the rest on a narrow terminal
            colour="green" if wants_colour(sys.stderr.isatty()) else None,
        )

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar, which can show the loss of every step."""
        return not self._bar.disable

    def say(self, text: str) -> None:
        """One line of text."""
        text = printable(text)
        self._print(paint_message(text) if self._colour else text)

    def step_done(self, loss: str = "") -> None:
        """Move the bar by one iteration, and show `loss` if it is given."""
        if loss:
            self._loss = loss
            self._set_postfix()
        self._bar.update()

    def log(self, record: Record) -> None:
        """The line of a logged step."""
        line = log_line(record, self._iterations)
        self._print(paint_log_line(line) if self._colour else line)
        self._loss, self._glance = f"loss {record['lm_loss']:.4f}", glance(record, self._gpu_bytes)
        self._set_postfix()

    def evaluation(self, record: Record, split: str, where: str) -> None:
        """Megatron-LM's line of an evaluation, which says "validation" for every split."""
        loss, perplexity = record[f"{split}_loss"], record[f"{split}_perplexity"]
        line = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        self._print(paint_log_line(line) if self._colour else line)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _print(self, line: str) -> None:
        """Raises BrokenPipeError, which says what to do, when the reader of a pipe has ended."""
        try:
            with self._writing(), tqdm.external_write_mode(file=sys.stdout):
                print(line, flush=True)
        except BrokenPipeError:
            problem = "what read it has ended; write the log to a file and read that"
            raise BrokenPipeError(errno.EPIPE, problem, "stdout") from None

    def _set_postfix(self) -> None:
        self._bar.set_postfix_str(self._loss + self._glance, refresh=False)


def glance(record: Record, gpu_bytes: int | None) -> str:
    """Rate, MFU, memory and power of a logged step, to follow the loss."""
    parts = [f"{tqdm.format_sizeof(number(record, 'tokens_per_second'))} tokens/s"]
    if record["mfu"] is not None:
        parts.append(f"MFU {100 * number(record, 'mfu'):.1f}%")
    if "memory_peak_bytes" in record:
        of = f" of {gpu_bytes / 2**30:.0f}" if gpu_bytes else ""
        parts.append(f"{number(record, 'memory_peak_bytes') / 2**30:.1f}{of} GiB")
    if "power_watts" in record:
        parts.append(f"{number(record, 'power_watts'):.0f} W")
    return "".join(f", {part}" for part in parts)


def log_line(record: Record, iterations: int) -> str:
    """Megatron-LM's line, which scripts parse, with tokens/s, MFU and time left appended."""
    left = (iterations - number(record, "iteration")) * number(record, "elapsed_ms") / 1000
    mfu = "n/a" if record["mfu"] is None else f"{100 * record['mfu']:.1f}%"
    if "mfu_16bit" in record:
        mfu += f" of the 8-bit peak, {100 * number(record, 'mfu_16bit'):.1f}% of the 16-bit one"
    parts = (
        f"iteration {record['iteration']:8d}/{iterations:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['elapsed_ms']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {record['tflops_per_gpu']:.1f}",
        f"learning rate: {record['learning_rate']:.6E}",
        *_given(record, "decoupled_learning_rate", "decoupled learning rate", ".6E"),
        f"global batch size: {record['global_batch_size']:5d}",
        f"lm loss: {record['lm_loss']:.6E}",
        f"loss scale: {record['loss_scale']:.1f}",
        f"grad norm: {record['grad_norm']:.3f}",
        *_given(record, "params_norm", "params norm", ".3f"),
        f"number of skipped iterations: {record['skipped']:3d}",
        f"number of nan iterations: {record['nan']:3d}",
        *([f"raised units: {record['raised_units']}"] if "raised_units" in record else []),
        f"tokens/s: {record['tokens_per_second']:.0f}",
        f"MFU: {mfu}",
        f"time left: {datetime.timedelta(seconds=math.ceil(left))}",
    )
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return f" [{now}] " + " | ".join(parts) + " |"


def _given(record: Record, name: str, shown: str, form: str) -> list[str]:
    """The part of the line for a number that is logged on request."""
    return [f"{shown}: {number(record, name):{form}}"] if name in record else []
