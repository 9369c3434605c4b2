"""The lines that a run prints: notes and warnings, and the log line for programs or for people."""

import datetime
import errno
import math
import shutil
import sys
from collections.abc import Sequence

from megatron_zpp.config.command_line import message_line
from megatron_zpp.config.options import printable
from megatron_zpp.config.words import duration
from megatron_zpp.reporting.metrics import Record

_MARGIN = "   │ "  # before each line of a text on a terminal


def tell(prog: str, line: str) -> None:
    """Write a line to stderr about slow work."""
    print(message_line(f"{prog}: {line}", sys.stderr.isatty()), file=sys.stderr, flush=True)


def warn(prog: str, rank: int, notes: Sequence[str]) -> None:
    """Write each note on the command line to stderr; only rank 0 does."""
    if rank == 0:
        for note in notes:
            tell(prog, f"warning: {note}")


def print_line(line: str) -> None:
    """Write a line to stdout.

    Raises BrokenPipeError, which says what to do, when the reader of a pipe has ended.
    """
    try:
        print(message_line(line, sys.stdout.isatty()), flush=True)
    except BrokenPipeError:
        problem = "what read it has ended; write the log to a file and read that"
        raise BrokenPipeError(errno.EPIPE, problem, "stdout") from None


def log_step(record: Record, iterations: int) -> None:
    """Write the line of a logged step to stdout: Megatron's in files and pipes, a short one on terminals."""
    if sys.stdout.isatty():
        print_line(terminal_line(record, iterations, _columns()))
    else:
        print_line(log_line(record, iterations))


def evaluation_line(record: Record, split: str, where: str) -> str:
    """Megatron-LM's line of an evaluation, which says "validation" for every split."""
    loss, perplexity = record[f"{split}_loss"], record[f"{split}_perplexity"]
    return f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"


def log_line(record: Record, iterations: int) -> str:
    """Megatron-LM's line, which scripts parse, with tokens/s, MFU and time left appended."""
    left = _seconds_left(record, iterations)
    mfu = "n/a" if record["mfu"] is None else f"{100 * record['mfu']:.1f}%"
    if "mfu_16bit" in record:
        mfu += f" of the 8-bit peak, {100 * record['mfu_16bit']:.1f}% of the 16-bit one"
    parts = (
        f"iteration {record['iteration']:8d}/{iterations:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['elapsed_ms']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {record['tflops_per_gpu']:.1f}",
        f"learning rate: {record['learning_rate']:.6E}",
        *_given(record, "decoupled_learning_rate", "decoupled learning rate", ".6E"),
        f"global batch size: {record['global_batch_size']:5d}",
        f"lm loss: {record['lm_loss']:.6E}",
        *_given(record, "z_loss", "z loss", ".6E"),
        f"loss scale: {record['loss_scale']:.1f}",
        f"grad norm: {record['grad_norm']:.3f}",
        *_given(record, "params_norm", "params norm", ".3f"),
        f"number of skipped iterations: {record['skipped']:3d}",
        f"number of nan iterations: {record['nan']:3d}",
        *_given(record, "raised_units", "raised units", ""),
        f"tokens/s: {record['tokens_per_second']:.0f}",
        f"MFU: {mfu}",
        f"time left: {datetime.timedelta(seconds=math.ceil(left))}",
    )
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return f" [{now}] " + " | ".join(parts) + " |"


def terminal_line(record: Record, iterations: int, columns: int) -> str:
    """A log line for people, of at most `columns` characters; where they are too few, its end is missing.

    What is as usual is omitted: a loss scale of 1, no skipped or NaN iterations, an unknown MFU.
    """
    rate, milliseconds = record["tokens_per_second"], record["elapsed_ms"]
    parts = [
        f"iteration {record['iteration']}/{iterations}",
        f"loss {record['lm_loss']:.4f}",
        *(f"{record[name]} {name}" for name in ("skipped", "nan") if record[name]),
        f"norm {record['grad_norm']:.3f}",
        f"lr {record['learning_rate']:.1e}",
        f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s",
        f"{rate:,.0f} tokens/s" if rate < 100_000 else f"{rate / 1e6:.1f}M tokens/s",
        *([] if record["mfu"] is None else [f"MFU {100 * record['mfu']:.1f}%"]),
        f"{duration(_seconds_left(record, iterations))} left",
        *([] if record["loss_scale"] == 1 else [f"scale {record['loss_scale']:g}"]),
    ]
    line = f" {parts[0]}"
    for part in parts[1:]:
        if len(line) + len(part) + 3 > columns:
            break
        line += f" | {part}"
    return line


def _seconds_left(record: Record, iterations: int) -> float:
    return (iterations - record["iteration"]) * record["elapsed_ms"] / 1000


def text_lines(iteration: int, text: str) -> list[str]:
    """A text that the model wrote: one line for files and pipes, its own lines for terminals."""
    if not sys.stdout.isatty():
        return [f" text at iteration {iteration} | {text!r} |"]
    width = max(1, _columns() - len(_MARGIN))
    cut = (
        line[at : at + width]
        for line in map(printable, text.splitlines())
        for at in range(0, max(1, len(line)), width)
    )
    return [f" text at iteration {iteration}:", *(_MARGIN + part for part in cut)]


def _columns() -> int:
    """The width of the terminal; 120 if it does not say."""
    return shutil.get_terminal_size((120, 0)).columns


def _given(record: Record, name: str, shown: str, form: str) -> list[str]:
    """The part of the line for a number that only some runs have."""
    return [f"{shown}: {record[name]:{form}}"] if name in record else []
