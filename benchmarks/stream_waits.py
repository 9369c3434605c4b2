"""Lists where the stream that computes waits in a trace that zero_speed.py --trace wrote.

python benchmarks/stream_waits.py --steps 3 --name slow_link_waits before=TRACE.json after=TRACE.json.gz

A wait is a pause of the stream with the most kernels, and has the names of the kernels on both sides and
of the collectives that ended in it, by stream. A pause that ends as a collective does was a wait for it.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from benchmarks.step_parts import parts_of_trace, read_trace

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME = 60  # characters of a kernel's name


def waits_of_trace(events: list[dict[str, Any]], least_ms: float) -> list[dict[str, Any]]:
    """The waits of at least `least_ms`, in order; `at_ms` counts from the first kernel of the stream."""
    streams: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _GPU_WORK:
            streams[event["args"]["stream"]].append(event)
    if not streams:
        return []
    compute = max(streams, key=lambda stream: len(streams[stream]))
    collectives = [
        event
        for stream, submitted in streams.items()
        if stream != compute
        for event in submitted
        if "nccl" in event["name"]
    ]
    work = sorted(streams[compute], key=lambda event: event["ts"])
    start, before, waits = work[0]["ts"], work[0], []
    for event in work[1:]:
        begin, end = before["ts"] + before["dur"], event["ts"]
        if end - begin >= least_ms * 1000:
            ended = [one for one in collectives if begin < one["ts"] + one["dur"] <= end]
            counts: dict[str, int] = defaultdict(int)
            for one in ended:
                counts[f"stream {one['args']['stream']}"] += 1
            waits.append(
                {
                    "at_ms": round((begin - start) / 1000, 2),
                    "ms": round((end - begin) / 1000, 2),
                    "after": before["name"][:_NAME],
                    "before": event["name"][:_NAME],
                    "collectives_that_ended": dict(counts),
                }
            )
        if event["ts"] + event["dur"] > begin:
            before = event
    return waits


def main() -> None:
    """Write the waits and parts of the traces to a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="LABEL=TRACE")
    parser.add_argument("--steps", type=int, required=True, help="whole steps of each trace")
    parser.add_argument("--least-ms", type=float, default=1.0, help="shorter pauses are not listed")
    parser.add_argument("--name", required=True, help="of the result")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = {}
    for labelled in options.traces:
        label, _, name = labelled.partition("=")
        trace = read_trace(Path(name))
        waits = waits_of_trace(trace["traceEvents"], options.least_ms)
        figures[label] = {
            "gpu": trace["deviceProperties"][0]["name"],
            "steps": options.steps,
            "waited_ms": round(sum(wait["ms"] for wait in waits), 2),  # by all steps; the first has fewer
            "parts_ms": parts_of_trace(Path(name), options.steps),
            "waits": waits,
        }
    write_result(options.name, figures, options.output)


if __name__ == "__main__":
    main()
