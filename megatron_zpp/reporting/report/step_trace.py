"""A trace of torch's profiler as lanes: what each stream of a GPU, or each thread of a CPU, did when."""

import gzip
import html
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.reporting.report.charts import WIDTH, nice_ticks, short
from megatron_zpp.storage.regular import open_stream

TRACE_LIMIT = 1 << 30  # bytes of JSON
KINDS = (  # (part of a kernel's name, kind), the first that fits
    ("AllGather", "gather"),
    ("ReduceScatter", "reduction"),
    ("SendRecv", "exchange between nodes"),
    ("Memcpy PtoP", "copy to or from another GPU"),
    ("Memcpy", "copy inside the GPU"),
    ("dequantize", "decode"),
    ("sum_quantize", "sum and encode again"),
    ("sum_into", "decode and sum"),
    ("sum_parts", "sum"),
    ("sum_and_square", "sum"),
    ("adamw", "AdamW"),
    ("quantize", "encode"),
    ("nvjet", "matrix product"),
    ("gemm", "matrix product"),
    ("cudnn", "attention"),
    ("flash", "attention"),
)
_CPU_KINDS = (
    ("allgather", "gather"),
    ("all_gather", "gather"),
    ("gloo:", "exchange"),
    ("adam", "AdamW"),
    ("attention", "attention"),
    ("mm", "matrix product"),
    ("linear", "matrix product"),
    ("matmul", "matrix product"),
)
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LANE, _LEFT, _TOP, _BOTTOM = 24, 96, 6, 34
_COLOURS = 6
_MOST_LANES = 12
Event = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """Spans (kind, start, length) of one stream or thread, in milliseconds from the start of the trace."""

    name: str
    spans: tuple[tuple[str, float, float], ...]

    @property
    def busy(self) -> float:
        """Milliseconds of all spans."""
        return sum(length for _, _, length in self.spans)


def kind_of(event: Event) -> str:
    """The kind of a kernel."""
    return next((kind for part, kind in KINDS if part in event["name"]), "other compute")


def read_trace(path: str) -> list[Lane]:
    """The busiest lanes of a trace. Raises ValueError if the file is not one."""
    try:
        with open_stream(path) as file:
            packed = Path(path).suffix == ".gz"
            text = (gzip.GzipFile(fileobj=file) if packed else file).read(TRACE_LIMIT + 1)
        events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
        lanes = _gpu_lanes(events) or _cpu_lanes(events)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile):
        lanes = []
    if len(lanes) == 0:
        raise ValueError(f"{path}: not a trace of --profile, or one without work")
    return lanes


def draw_lanes(lanes: Sequence[Lane], title: str) -> str:
    """A figure with a row for each lane and a colour for each of the kinds that take most time."""
    end = max(start + length for lane in lanes for _, start, length in lane.spans)
    width, height = 2 * WIDTH, _TOP + _LANE * len(lanes) + _BOTTOM
    scale = (width - _LEFT - 16) / end
    totals: defaultdict[str, float] = defaultdict(float)
    for lane in lanes:
        for kind, _, length in lane.spans:
            totals[kind] += length
    ranked = sorted(totals, key=lambda kind: totals[kind], reverse=True)
    colours = {kind: min(index, _COLOURS - 1) for index, kind in enumerate(ranked)}
    parts = []
    for row, lane in enumerate(lanes):
        top = _TOP + row * _LANE
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{html.escape(lane.name)}</text>'
        )
        for kind, start, length in _merged(lane.spans, 1 / scale):
            parts.append(
                f'<rect class="s{colours[kind]}" stroke="none" x="{_LEFT + start * scale:.1f}" y="{top + 2}" '
                f'width="{max(length * scale, 0.6):.1f}" height="{_LANE - 6}"/>'
            )
    for tick in nice_ticks(0, end, 10):
        at = _LEFT + tick * scale
        parts.append(f'<text x="{at:.1f}" y="{height - 16}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 2}" text-anchor="middle">milliseconds</text>')
    names = [*ranked[: _COLOURS - 1], *(["others"] if len(ranked) > _COLOURS else ranked[_COLOURS - 1 :])]
    keys = "".join(
        f'<span class="key k{index}">{html.escape(name)}</span>' for index, name in enumerate(names)
    )
    caption = f'{html.escape(title)}<span class="legend">{keys}</span>'
    return (
        f'<figure class="chart"><figcaption>{caption}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg></figure>'
    )


def _gpu_lanes(events: list[Event]) -> list[Lane]:
    work = [event for event in events if event.get("cat") in _GPU]
    return _lanes([(f"stream {event['args']['stream']}", kind_of(event), event) for event in work])


def _cpu_lanes(events: list[Event]) -> list[Lane]:
    """Outermost operations of each thread: an operation inside another one is part of it."""
    work = []
    ends: defaultdict[int, float] = defaultdict(float)
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(operations, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends[event["tid"]]:
            ends[event["tid"]] = event["ts"] + event["dur"]
            name = event["name"].lower()
            kind = next((kind for part, kind in _CPU_KINDS if part in name), "other compute")
            work.append((f"thread {event['tid']}", kind, event))
    return _lanes(work)


def _lanes(work: list[tuple[str, str, Event]]) -> list[Lane]:
    begin = min((event["ts"] for _, _, event in work), default=0.0)
    spans: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for name, kind, event in work:
        spans[name].append((kind, (event["ts"] - begin) / 1000, event["dur"] / 1000))
    lanes = [Lane(name, tuple(sorted(found, key=lambda span: span[1]))) for name, found in spans.items()]
    return sorted(lanes, key=lambda lane: lane.busy, reverse=True)[:_MOST_LANES]


def _merged(spans: Sequence[tuple[str, float, float]], gap: float) -> list[tuple[str, float, float]]:
    """Spans of one kind that a pixel does not separate, joined: a step has tens of thousands."""
    joined: list[tuple[str, float, float]] = []
    for kind, start, length in spans:
        if joined and joined[-1][0] == kind and start - (joined[-1][1] + joined[-1][2]) < gap:
            first = joined[-1][1]
            joined[-1] = (kind, first, max(joined[-1][2], start + length - first))
        else:
            joined.append((kind, start, length))
    return joined
