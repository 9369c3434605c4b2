"""The report of a run as one HTML page that needs no other file and no network; page.html is its template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import StrictUndefined, Template  # which torch brings

from megatron_zpp.config.words import duration
from megatron_zpp.reporting.report.charts import chart, short
from megatron_zpp.reporting.report.curves import (
    AXIS_LABELS,
    Axis,
    Curve,
    by_iteration,
    curve,
    metric_names,
    smoothed,
    tokens_trained,
)

_MOST_SAMPLES = 12
_SAMPLE = re.compile(r"sample(_\d+)?")  # the key of a text, with the number of its prompt
Records = Sequence[dict[str, Any]]
# A row of a table: what, planned, measured, and what differs or why one is missing.
Comparison = tuple[str, str, str, str]


@dataclass(frozen=True)
class Setting:
    """A flag of the run, and whether neither its default nor another flag implies its value."""

    part: str
    flag: str
    value: str
    changed: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page shows. Lists may be empty: their sections are then left out."""

    title: str
    source: str  # where the numbers come from
    records: Records
    axis: Axis = "iteration"
    smoothing: float = 0.6
    iterations: int | None = None  # of the whole run, if known
    settings: Sequence[Setting] = ()
    memory: Sequence[Comparison] = ()
    traffic: Sequence[Comparison] = ()


def page(report: Report) -> str:
    text = Path(__file__).with_name("page.html").read_text()
    template = Template(
        text, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return template.render(
        report=report,
        tiles=_tiles(report),
        charts=_curves(report),
        samples=_samples(report.records),
        times=_times(report.records),
    )


def _tiles(report: Report) -> list[tuple[str, str]]:
    """The figures that are looked at first, and what each is."""
    records = report.records
    newest = max(record["iteration"] for record in records)
    of = f" of {report.iterations:,}" if report.iterations else ""
    tiles = [(f"{newest:,}", f"iterations{of}")]
    if by_iteration(records, "consumed_samples"):
        tokens = list(tokens_trained(records).values())
        tiles.append((short(tokens[-1]), "tokens trained on"))
    for name, what, shown in (
        ("lm_loss", "training loss, last", lambda values: f"{values[-1]:.4f}"),
        ("valid_loss", "validation loss, last", lambda values: f"{values[-1]:.4f}"),
        ("valid_perplexity", "validation perplexity, last", lambda values: short(values[-1])),
        ("tokens_per_second", "tokens/s, median", lambda values: short(median(values))),
        ("mfu", "MFU, median", lambda values: f"{100 * median(values):.1f}%"),
        ("memory_peak_bytes", "peak memory of rank 0", lambda values: f"{max(values) / 2**30:.2f} GiB"),
    ):
        if values := list(by_iteration(records, name).values()):
            tiles.append((shown(values), what))
    if hours := curve(records, "elapsed_ms", "hours").x if by_iteration(records, "elapsed_ms") else []:
        tiles.append((duration(3600 * hours[-1]), "of training"))
    bad = [sum(by_iteration(records, name).values()) for name in ("skipped", "nan")]
    tiles.append((f"{bad[0]:,.0f} / {bad[1]:,.0f}", "skipped / NaN iterations"))
    return tiles


def _curves(report: Report) -> str:
    """A chart for each kind of number that changes."""
    train, valid = (curve(report.records, name, report.axis) for name in ("lm_loss", "valid_loss"))
    name, label = "training", AXIS_LABELS[report.axis]
    if report.smoothing and len(train.y) > 20:
        name, train = "training, smoothed", Curve(train.x, smoothed(train.y, report.smoothing))
    losses = {name: train, "validation": valid}
    charts = [chart(losses, title="Loss, nats per token", x_label=label)]
    for names, title in (
        (("grad_norm",), "Gradient norm before clipping"),
        (("learning_rate",), "Learning rate"),
        (("tokens_per_second",), "Tokens per second"),
        (("mfu",), "MFU"),
        (("memory_peak_bytes", "memory_allocated_bytes"), "Memory of rank 0, GiB"),
        (("inter_node_bytes", "intra_node_bytes"), "Bytes sent in a step"),
        (("global_batch_size",), "Global batch size"),
        (("loss_scale",), "Loss scale"),
        (("raised_units",), "Units that sent 8 bits"),
        (("outer_seconds", "outer_wait_seconds"), "Seconds of an exchange of islands"),
        (("skipped", "nan"), "Skipped and NaN iterations"),
    ):
        found = [(name, curve(report.records, name, report.axis)) for name in names]
        curves = dict(_in_unit(name, each) for name, each in found if _worth_drawing(name, each))
        charts.append(chart(curves, title=title, x_label=label))
    return "".join(charts)


def _in_unit(name: str, found: Curve) -> tuple[str, Curve]:
    """The name of a curve without its unit, and memory in GiB."""
    if name.startswith("memory_"):
        found = Curve(found.x, [y / 2**30 for y in found.y])
    return name.removeprefix("memory_").removesuffix("_bytes").replace("_", " "), found


def _worth_drawing(name: str, found: Curve) -> bool:
    """Whether a curve says more than a number: counts, batch and scale only if they change."""
    steady = ("skipped", "nan", "global_batch_size", "loss_scale", "inter_node_bytes", "intra_node_bytes")
    return len(found.y) > 1 and not (name in steady and len(set(found.y)) == 1)


def _times(records: Records) -> dict[str, str]:
    """Milliseconds of the parts of a step, by --timing-log-level."""
    parts = {
        name.removeprefix("time_").removesuffix("_ms").replace("_", " "): by_iteration(records, name).values()
        for name in metric_names(records)
        if name.startswith("time_") and name.endswith("_ms")
    }
    whole = {"whole step": by_iteration(records, "elapsed_ms").values()} if parts else {}
    return {name: short(median(values)) for name, values in (whole | parts).items()}


def _samples(records: Records) -> list[tuple[str, list[str]]]:
    """The newest texts of each prompt, the newest first, and the first ones to compare with."""
    found = [
        (f"{record['iteration']:,}", texts)
        for record in records
        if (texts := [text for key, text in record.items() if _SAMPLE.fullmatch(key) and type(text) is str])
    ]
    if len(found) > _MOST_SAMPLES:
        found = [found[0], *found[1 - _MOST_SAMPLES :]]
    return found[::-1]
