"""Where the computing stream of a trace waits, and for which collectives."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.stream_waits import waits_of_trace
from tests.support import ROOT


def kernel(name: str, stream: int, start: float, stop: float) -> dict:
    """An event of a trace; times in ms."""
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": 1000 * start,
        "dur": 1000 * (stop - start),
        "args": {"stream": stream},
    }


def test_waits_have_the_collectives_that_ended_in_them() -> None:
    events = [
        kernel("product", 7, 10, 20),
        kernel("long", 7, 20.5, 40),  # half a millisecond is no wait
        kernel("short", 7, 21, 22),  # beside the long one, which ends later
        kernel("after", 7, 45, 50),
        kernel("last", 7, 52, 53),
        kernel("ncclDevKernel_AllGather", 20, 0, 30),
        kernel("ncclDevKernel_AllGather", 20, 30, 44.5),
        kernel("sum", 20, 51, 51.5),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10**9},
    ]
    first, second = waits_of_trace(events, least_ms=1)
    assert first == {
        "at_ms": 30,
        "ms": 5,
        "after": "long",
        "before": "after",
        "collectives_that_ended": {"stream 20": 1},
    }
    assert (second["at_ms"], second["ms"], second["collectives_that_ended"]) == (40, 2, {})
    assert waits_of_trace(events, least_ms=10) == []
    assert waits_of_trace([], least_ms=1) == []


def test_the_command_writes_a_result(tmp_path: Path) -> None:
    events = [kernel("product", 7, 0, 10), kernel("after", 7, 12, 14)]
    trace = tmp_path / "rank0.json"
    trace.write_text(json.dumps({"deviceProperties": [{"name": "GPU"}], "traceEvents": events}))
    command = [
        sys.executable,
        "benchmarks/stream_waits.py",
        f"one={trace}",
        "--steps",
        "1",
        "--name",
        "waits",
    ]
    subprocess.run([*command, "--output", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    figures = json.loads((tmp_path / "waits.json").read_text())["figures"]["one"]
    assert (figures["gpu"], figures["waited_ms"]) == ("GPU", 2)
    assert [wait["at_ms"] for wait in figures["waits"]] == [10]
