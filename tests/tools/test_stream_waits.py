"""Where the computing stream of a trace waits, and for which collectives."""

from benchmarks.stream_waits import waits_of_trace


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
