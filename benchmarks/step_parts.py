"""Splits the time of a traced step by what the GPU did.

Where kernels of two kinds run at once, their time is the first one's in the order of PARTS: communication is
exposed where nothing else ran beside it.
"""

import gzip
import json
from pathlib import Path

KERNELS = (  # (part of a kernel's name, part of the step), the first that fits
    *((name, "exposed communication") for name in ("AllGather", "ReduceScatter", "SendRecv", "Memcpy PtoP")),
    ("Memcpy", "copies"),
    *((name, "codes") for name in ("dequantize", "sum_quantize", "sum_into", "sum_parts", "sum_and_square")),
    ("adamw", "AdamW"),
    ("quantize", "codes"),
    *((name, "matrix products") for name in ("nvjet", "gemm")),
    *((name, "attention") for name in ("cudnn", "flash")),
)
PARTS = (
    *("matrix products", "attention", "AdamW", "other compute", "codes", "copies"),
    *("exposed communication", "idle"),
)
Span = tuple[float, float]


def parts_of_trace(path: Path, steps: int) -> dict[str, float]:
    """Milliseconds of a step by part, from a trace of torch's profiler of `steps` whole steps.

    Times in a trace are in microseconds. It is compressed if its name ends in .gz.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        traced = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in traced if event.get("ph") == "X" and event.get("cat") in kinds]
    if not events:
        return dict.fromkeys(PARTS, 0.0)
    spans: dict[str, list[Span]] = {part: [] for part in PARTS}
    for event in events:
        part = next((part for name, part in KERNELS if name in event["name"]), "other compute")
        spans[part].append((event["ts"], event["ts"] + event["dur"]))
    start = min(event["ts"] for event in events)
    stop = max(event["ts"] + event["dur"] for event in events)
    busy: list[Span] = []
    found = {}
    for part in PARTS[:-1]:
        before = _length(busy)
        busy = _union([*busy, *spans[part]])
        found[part] = (_length(busy) - before) / steps / 1000
    found["idle"] = (stop - start - _length(busy)) / steps / 1000
    return {part: round(value, 3) for part, value in found.items()}


def _union(spans: list[Span]) -> list[Span]:
    """Merge spans: ordered spans without overlap that cover the same time."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)
