"""All that a run prints: its head, Megatron's log line and, on a terminal, a progress bar."""

import datetime
import math
import sys
from collections.abc import Sequence

from tqdm import tqdm

from megatron_zpp.reporting.metrics import Record, number


def tell(prog: str, line: str) -> None:
    """Write a line to stderr about slow work before the log begins."""
    print(f"{prog}: {line}", file=sys.stderr, flush=True)


def warn(prog: str, rank: int, notes: Sequence[str]) -> None:
    """Write each note on the command line to stderr; only rank 0 does."""
    if rank == 0:
        for note in notes:
            print(f"{prog}: warning: {note}", file=sys.stderr, flush=True)


class Console:
    """Prints for one rank. On a terminal, a bar below the lines shows rate and time left."""

    def __init__(self, iterations: int, done: int) -> None:
        self._iterations = iterations
        self._bar = tqdm(
            total=iterations,
            initial=done,
            unit="it",
            desc="training",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )

    def say(self, text: str) -> None:
        """One line of text."""
        with tqdm.external_write_mode(file=sys.stdout):
            print(text, flush=True)

    def step_done(self) -> None:
        """Moves the bar by one iteration."""
        self._bar.update()

    def log(self, record: Record) -> None:
        """The line of a logged step."""
        self.say(log_line(record, self._iterations))
        mfu = "" if record["mfu"] is None else f", MFU {100 * record['mfu']:.1f}%"
        rate = tqdm.format_sizeof(record["tokens_per_second"])
        self._bar.set_postfix_str(f"loss {record['lm_loss']:.4f}, {rate} tokens/s{mfu}")

    def evaluation(self, record: Record, split: str, where: str) -> None:
        """The line of an evaluation."""
        loss, perplexity = record[f"{split}_loss"], record[f"{split}_perplexity"]
        self.say(f" {split} loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |")

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()


def log_line(record: Record, iterations: int) -> str:
    """Megatron-LM's line, which scripts parse, with tokens/s, MFU and time left appended."""
    left = (iterations - number(record, "iteration")) * number(record, "elapsed_ms") / 1000
    mfu = "n/a" if record["mfu"] is None else f"{100 * record['mfu']:.1f}%"
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
        *_given(record, "num_zeros", "num zeros", "d"),
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
