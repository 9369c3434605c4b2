"""Draws curves of runs: `megatron-zpp plot METRICS.jsonl … --output FILE.png`.

By default training loss as a line and validation loss as dots. `--metric` draws other numbers of the metrics
files, one below the other. Runs with the same label are drawn as their mean and a band from the least to the
most of them.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from megatron_zpp.config.command_line import command_options, program_name
from megatron_zpp.config.options import REQUIRED, Options, option, option_error, switch
from megatron_zpp.reporting.console import warn
from megatron_zpp.reporting.report.curves import (
    AXIS_LABELS,
    Axis,
    Band,
    band,
    by_iteration,
    curve,
    metric_names,
    read_metrics,
)
from megatron_zpp.storage.files import check_replaceable, write_whole

_FORMATS = (".png", ".svg", ".pdf")
_LABELS = {
    "lm_loss": "cross-entropy (nats per token)",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "mfu": "MFU",
    "elapsed_ms": "milliseconds per step",
    "inter_node_bytes": "bytes between nodes per step",
    "intra_node_bytes": "bytes inside nodes per step",
    "memory_peak_bytes": "peak memory (bytes)",
}
Records = list[dict[str, Any]]  # of one run
Runs = dict[str, list[Records]]  # by label


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Options):
    """plot: curves from metrics files"""

    runs: tuple[str, ...] = option(REQUIRED, "Metrics files, one per run.", positional=True)
    output: str = option("loss.png", "Picture to write: .png, .svg or .pdf.")
    metric: tuple[str, ...] = option(
        ("lm_loss",),
        "Numbers to draw, such as grad_norm or tokens_per_second; lm_loss has valid_loss with it.",
    )
    x: Axis = option("iteration", "The axis below the curves.")
    log_x: bool = switch("Logarithmic axis below the curves.")
    log_y: bool = switch("Logarithmic axis of the values.")
    smoothing: float = option(
        0.0, "Weight of the past in a moving average; 0.9 is smooth.", at_least=0, below=1
    )
    labels: tuple[str, ...] = option(
        (), "A name for each run, by default its file's; runs with the same name become a band."
    )
    title: str = option("", "Title of the picture.")

    def check(self) -> None:
        """The suffix decides the format; labels are for all runs or for none."""
        if not self.output.endswith(_FORMATS):
            raise self.error("output", f"must end in {', '.join(_FORMATS)}")
        if self.labels and len(self.labels) != len(self.runs):
            raise self.error("labels", f"must be {len(self.runs)}, one for each run")


def main() -> None:
    """Draw the files of the command line."""
    config = command_options(PlotConfig, __doc__)
    check_replaceable("--output", config.output)
    draw(load(config.runs, config.labels or _names(config.runs)), config)
    print(f"wrote {config.output}")


def load(paths: Sequence[str], labels: Sequence[str]) -> Runs:
    """The records of the runs by label; warns of lines that are skipped."""
    runs: Runs = {}
    for path, label in zip(paths, labels, strict=True):
        runs.setdefault(label, []).append(read_metrics(path, lambda note: warn(program_name(), 0, [note])))
    return runs


def draw(runs: Runs, config: PlotConfig) -> None:
    """Draw each metric in axes of its own, one colour per label. Raises ValueError if no run has a metric."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = metric_names(record for records in runs.values() for run in records for record in run)
    for metric in config.metric:
        if metric not in known:
            raise option_error("--metric", metric, f"no run has it; there are {', '.join(known)}")
    size = (8, 1.5 + 3.5 * len(config.metric))
    figure, rows = pyplot.subplots(len(config.metric), figsize=size, layout="constrained", squeeze=False)
    for axes, metric in zip(rows[:, 0], config.metric, strict=True):
        for index, (label, records) in enumerate(runs.items()):
            _draw_metric(axes, metric, label, records, index, config)
        axes.set(xlabel=AXIS_LABELS[config.x], ylabel=_LABELS.get(metric, metric.replace("_", " ")))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        if config.log_x:
            axes.set_xscale("log")
        if config.log_y:
            axes.set_yscale("log")
    rows[0, 0].set_title(config.title or ("Loss" if config.metric == ("lm_loss",) else ""))
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    image = BytesIO()
    figure.savefig(image, dpi=120, format=Path(config.output).suffix[1:])
    write_whole(Path(config.output), image.getvalue())
    pyplot.close(figure)


def _draw_metric(
    axes: Any, metric: str, label: str, records: Sequence[Records], number: int, config: PlotConfig
) -> None:
    """One metric of the runs of one label: lines, and for the loss the dots of evaluations."""
    loss, colour = metric == "lm_loss", f"C{number % 10}"
    shown = label.replace("$", r"\$")  # between two of them matplotlib reads mathematics
    shown = f" {shown}" if shown.startswith("_") else shown  # it omits such names from legends
    if having := [run for run in records if by_iteration(run, metric)]:
        joined = _draw_range(axes, metric, label, having, colour, config)
        name = f"{shown}: training" if loss else shown
        if len(having) > 1:
            name += f", mean of {len(having)}"
        elif config.smoothing:
            points = curve(having[0], metric, config.x)
            axes.plot(points.x, points.y, color=colour, alpha=0.2)
        form = "-" if len(joined.x) > 1 else "o"  # a line of one point is invisible
        axes.plot(joined.x, joined.mean, form, color=colour, alpha=0.6 if loss else 0.9, label=name)
    if loss and (having := [run for run in records if by_iteration(run, "valid_loss")]):
        unsmoothed = dataclasses.replace(config, smoothing=0.0)
        joined = _draw_range(axes, "valid_loss", label, having, colour, unsmoothed)
        axes.plot(joined.x, joined.mean, "o-", color=colour, label=f"{shown}: validation")
        last = (joined.x[-1], joined.mean[-1])
        beside = {"xytext": (4, 8 + 12 * number), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"{last[1]:.3f}", last, color=colour, **beside)  # last values are often close together


def _draw_range(
    axes: Any, metric: str, label: str, runs: Sequence[Records], colour: str, config: PlotConfig
) -> Band:
    """The band of one label, of which the range is drawn. Raises ValueError without a common iteration."""
    joined = band(runs, metric, config.x, config.smoothing)
    if not joined.x:
        raise option_error("--labels", label, f"its runs have {metric} at no iteration in common")
    if len(runs) > 1:
        axes.fill_between(joined.x, joined.least, joined.most, color=colour, alpha=0.2, linewidth=0)
    return joined


def _names(paths: Sequence[str]) -> list[str]:
    """The files' names without .jsonl, with their folders where two names are equal."""
    names = [Path(path).name.removesuffix(".jsonl") for path in paths]
    return [
        name if names.count(name) == 1 else path.removesuffix(".jsonl")
        for name, path in zip(names, paths, strict=True)
    ]
