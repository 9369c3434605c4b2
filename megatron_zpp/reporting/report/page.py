"""The report of a run as one HTML page that needs no other file and no network."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_zpp.config.words import duration
from megatron_zpp.reporting.report.charts import chart, short
from megatron_zpp.reporting.report.curves import (
    AXIS_LABELS,
    Axis,
    Curve,
    by_iteration,
    curve,
    smoothed,
    tokens_trained,
)

_MOST_SAMPLES = 12
_SAMPLE = re.compile(r"sample(_\d+)?")  # the key of a text, with the number of its prompt
Records = Sequence[dict[str, Any]]
# A row of a table: what, planned, measured, and what differs or why one is missing.
Comparison = tuple[str, str, str, str]
_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --muted: #667080; --grid: #e4e7ec; --accent: #2563b0;
  --series-0: #2563b0; --series-1: #d9662b; --series-2: #2f8f5b; --series-3: #8a4fbf; --series-4: #b8912a;
  --series-5: #5b6776; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1d2127; --text: #e6e9ee; --muted: #97a1b0; --grid: #2e343d; --accent: #6aa5ec;
  --series-0: #6aa5ec; --series-1: #f0975f; --series-2: #63c48f; --series-3: #bb8fe6; --series-4: #dcb95c;
  --series-5: #9aa6b6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 12px; }
.sub, .note { color: var(--muted); margin: 0; font-size: 13.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 12px;
  margin: 20px 0 8px; }
.tile, .chart, .card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 11px 14px; } .tile b { display: block; font-size: 21px; font-weight: 600; line-height: 1.3;
  font-variant-numeric: tabular-nums; } .tile span { color: var(--muted); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
.chart { margin: 0; padding: 14px 14px 8px; } .chart svg { width: 100%; display: block; }
figcaption { font-weight: 600; font-size: 14.5px; margin: 0 4px 6px; }
.card { padding: 4px 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
tr:last-child td { border-bottom: 0; } th { color: var(--muted); font-weight: 500; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.flag { display: inline-block; margin-right: 18px; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--accent); font-size: 14px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  font: 13px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; }
"""


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
    """The page's text."""
    sections = [
        f"<h1>{html.escape(report.title)}</h1><p class=sub>{html.escape(report.source)}</p>",
        _tiles(report),
        _section("Curves", _curves(report)),
        _section("Text that the model wrote", _samples(report.records)),
        _section("Where the time of a step goes", _step(report)),
        _section("Memory of each rank, planned and measured", _comparisons(report.memory)),
        _section("Bytes sent in a step by all ranks together", _comparisons(report.traffic)),
        _section("Configuration", _configuration(report.settings)),
    ]
    title = html.escape(report.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>\n" if content else ""


def _table(rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    """A table of cells in HTML; the columns `numbers` are aligned at the right. Empty without rows."""

    def shown(cells: Sequence[str], tag: str) -> str:
        starts = [
            f"<{tag} class=number>" if column in numbers else f"<{tag}>" for column in range(len(cells))
        ]
        joined = (f"{start}{cell}</{tag}>" for start, cell in zip(starts, cells, strict=True))
        return f"<tr>{''.join(joined)}</tr>"

    body = "".join(shown(row, "td") for row in rows)
    first = shown(head, "th") if head else ""
    return f"<div class=card><table>{first}{body}</table></div>" if body else ""


def _tiles(report: Report) -> str:
    """The figures that are looked at first."""
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
    joined = "".join(f"<div class=tile><b>{value}</b><span>{name}</span></div>" for value, name in tiles)
    return f"<div class=tiles>{joined}</div>"


def _curves(report: Report) -> str:
    """A chart for each kind of number that changes."""
    charts = [_loss_chart(report)]
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
        (("skipped", "nan"), "Skipped and NaN iterations"),
    ):
        found = [(name, curve(report.records, name, report.axis)) for name in names]
        curves = dict(_in_unit(name, each) for name, each in found if _worth_drawing(name, each))
        charts.append(chart(curves, title=title, x_label=AXIS_LABELS[report.axis]))
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _in_unit(name: str, found: Curve) -> tuple[str, Curve]:
    """The name of a curve without its unit, and memory in GiB."""
    if name.startswith("memory_"):
        found = Curve(found.x, [y / 2**30 for y in found.y])
    return name.removeprefix("memory_").removesuffix("_bytes").replace("_", " "), found


def _worth_drawing(name: str, found: Curve) -> bool:
    """Whether a curve says more than a number: counts, batch and scale only if they change."""
    steady = ("skipped", "nan", "global_batch_size", "loss_scale", "inter_node_bytes", "intra_node_bytes")
    return len(found.y) > 1 and not (name in steady and len(set(found.y)) == 1)


def _loss_chart(report: Report) -> str:
    train, valid = (curve(report.records, name, report.axis) for name in ("lm_loss", "valid_loss"))
    name = "training"
    if report.smoothing and len(train.y) > 20:
        name, train = "training, smoothed", Curve(train.x, smoothed(train.y, report.smoothing))
    curves = {name: train, "validation": valid}
    return chart(curves, title="Loss, nats per token", x_label=AXIS_LABELS[report.axis])


def _step(report: Report) -> str:
    """Parts of a step by --timing-log-level."""
    times = {
        name[len("time_") : -len("_ms")].replace("_", " "): median(
            by_iteration(report.records, name).values()
        )
        for name in dict.fromkeys(name for record in report.records for name in record)
        if name.startswith("time_") and name.endswith("_ms") and by_iteration(report.records, name)
    }
    if not times:
        return ""
    times = {"whole step": median(by_iteration(report.records, "elapsed_ms").values())} | times
    head = "<p class=sub>Median over logged steps, of the slowest rank</p>"
    rows = ((html.escape(name), f"{short(time)} ms") for name, time in times.items())
    return head + _table(rows, numbers=[1])


def _comparisons(rows: Sequence[Comparison]) -> str:
    cells = (list(map(html.escape, row)) for row in rows)
    return _table(cells, head=("", "planned", "measured", ""), numbers=[1, 2])


def _configuration(settings: Sequence[Setting]) -> str:
    if not settings:
        return ""
    changed = _settings_table([setting for setting in settings if setting.changed])
    return (
        f"<p class=sub>Settings that neither defaults nor other settings imply</p>{changed}"
        f"<details><summary>All {len(settings)} settings</summary>{_settings_table(settings)}</details>"
    )


def _settings_table(settings: Sequence[Setting]) -> str:
    parts: dict[str, str] = {}
    for each in settings:
        shown = f"<code class=flag>{html.escape(each.flag)} {html.escape(each.value)}</code> "
        parts[each.part] = parts.get(each.part, "") + shown
    return _table((html.escape(part.replace("_", " ")), flags) for part, flags in parts.items())


def _samples(records: Records) -> str:
    """The newest texts of each prompt, and the first ones to compare with."""
    found = [
        (record["iteration"], texts)
        for record in records
        if (texts := [text for key, text in record.items() if _SAMPLE.fullmatch(key) and type(text) is str])
    ]
    if len(found) > _MOST_SAMPLES:
        found = [found[0], *found[1 - _MOST_SAMPLES :]]
    rows = (
        (f"{iteration:,}", *(f"<pre>{html.escape(text)}</pre>" for text in texts))
        for iteration, texts in reversed(found)
    )
    return _table(rows, head=("iteration", "text"), numbers=[0])
