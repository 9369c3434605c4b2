"""Draws one step of a trace of benchmarks/zero_speed.py: which kernels ran at the same time.

python benchmarks/timeline.py TRACE.json[.gz] OUTPUT.png [--title TEXT]

A row is a stream of the GPU, named by what it carries; the step is the last whole one of the trace.
"""

import argparse
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.step_parts import read_trace
from megatron_zpp.reporting.report.step_trace import Event, kind_of


def last_step(events: list[Event]) -> tuple[float, float]:
    """Microseconds between the ends of AdamW's last two runs over the units."""
    steps = sorted(event["ts"] + event["dur"] for event in events if kind_of(event) == "AdamW")
    if not steps:
        raise SystemExit("the trace has no kernel of AdamW, so no step can be told from another")
    longest = max(later - earlier for earlier, later in pairwise(steps))
    ends = [a for a, b in pairwise(steps) if b - a > longest / 2] + [steps[-1]]
    return ends[-2], ends[-1]


def rows(events: list[Event]) -> list[tuple[str, list[Event]]]:
    """Streams with their events, the busiest of computation first, each named by its two main kinds."""
    streams = defaultdict(list)
    for event in events:
        streams[event["args"]["stream"]].append(event)
    named = []
    for stream in streams.values():
        time: defaultdict[str, float] = defaultdict(float)
        for event in stream:
            time[kind_of(event)] += event["dur"]
        kinds = sorted(time, key=lambda kind: time[kind], reverse=True)
        named.append(("compute" if "matrix product" in kinds else " /\n".join(kinds[:2]), stream))
    return sorted(named, key=lambda row: (row[0] != "compute", min(event["ts"] for event in row[1])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    events = [
        event
        for event in read_trace(options.trace)["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")
    ]
    start, stop = last_step(events)
    shown = rows([event for event in events if start <= event["ts"] < stop])
    kinds = list(dict.fromkeys(kind_of(event) for _, stream in shown for event in stream))
    colors = dict(zip(kinds, plt.cm.tab20.colors, strict=False))
    figure, axes = plt.subplots(figsize=(14, 0.9 + 0.62 * len(shown)), layout="constrained")
    for row, (_, stream) in enumerate(shown):
        for kind in kinds:
            bars = [
                ((event["ts"] - start) / 1000, event["dur"] / 1000)
                for event in stream
                if kind_of(event) == kind
            ]
            # an outline makes events of microseconds visible
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colors[kind], linewidth=0.5)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, (stop - start) / 1000)
    axes.set_xlabel("milliseconds")
    axes.set_title(options.title, fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[kind]) for kind in kinds]
    figure.legend(handles, kinds, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
