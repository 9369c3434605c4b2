"""Draws loss curves: `python -m megatron_zpp.commands.plot METRICS.jsonl … --output FILE.png`."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import REQUIRED, Options, option, option_error, parse_options
from megatron_zpp.reporting.metrics import Record
from megatron_zpp.storage.regular import open_stream

PROG = "plot"
LINE_LIMIT = 1 << 20  # bytes; a record has a few dozen numbers
Curve = tuple[list[int], list[float]]


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Options):
    """plot: loss curves from metrics files"""

    runs: tuple[str, ...] = option(REQUIRED, "Metrics files, one per run.", positional=True)
    output: str = option("loss.png", "Picture to write.")

    def check(self) -> None:
        """The suffix decides the format; only PNG is offered."""
        if not self.output.endswith(".png"):
            raise option_error("--output", self.output, "must end in .png")


def main() -> None:
    """Draw the files of the command line."""
    config = parse_options(PlotConfig, PROG, __doc__, sys.argv[1:])
    draw({Path(run).stem: read_metrics(run) for run in config.runs}, config.output)
    print(f"wrote {config.output}")


def read_metrics(path: str) -> list[Record]:
    """The records of a metrics file. Raises ValueError, with the line number, if a line is not a record."""
    records = []
    with open_stream(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT), b""), 1):
            try:
                record = json.loads(line)
                record["iteration"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}:{number}: not a line of a metrics file") from None
            records.append(record)
    if not records:
        raise ValueError(f"{path}: empty; a run writes it with --metrics-file")
    return records


def curve(records: Sequence[Mapping[str, Any]], name: str) -> Curve:
    """(iterations, values) of one number; if a resumed run repeats an iteration, the later value counts."""
    points = {record["iteration"]: record[name] for record in records if record.get(name) is not None}
    return sorted(points), [points[iteration] for iteration in sorted(points)]


def draw(runs: dict[str, list[Record]], output: str) -> None:
    """Draw training loss as lines and validation loss as dots, one colour per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, (name, records) in enumerate(runs.items()):
        colour = f"C{index % 10}"
        axes.plot(*curve(records, "lm_loss"), color=colour, alpha=0.6, label=f"{name}: training")
        iterations, losses = curve(records, "valid_loss")
        axes.plot(iterations, losses, "o-", color=colour, label=f"{name}: validation")
        if losses:
            axes.annotate(f"{losses[-1]:.3f}", (iterations[-1], losses[-1]), xytext=(4, 8), **_ABOVE)
    axes.set(xlabel="iteration", ylabel="cross-entropy (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


_ABOVE = {"textcoords": "offset points", "ha": "right"}

if __name__ == "__main__":
    run_tool(PROG, main)
