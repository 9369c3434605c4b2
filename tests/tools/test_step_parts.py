"""Where the time of a traced step went: spans that overlap are counted once."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.step_parts import PARTS, parts_of_trace

KERNELS = [  # name, start and end in ms: two steps of 50 ms
    ("nvjet_hsh_128x256", 0, 30),
    ("void pytorch_flash::flash_fwd_kernel", 20, 40),  # 10 of it beside a product
    ("triton_poi_fused_gelu_1", 40, 45),
    ("ncclDevKernel_AllGather", 10, 60),  # 15 of it beside nothing
    ("adamw_kernel", 70, 90),
    ("Memcpy PtoP (Device -> Device)", 75, 80),
    ("nvjet_hsh_128x256", 95, 100),
]


def test_parts_of_a_step(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": 1000 * start, "dur": 1000 * (stop - start)}
        for name, start, stop in KERNELS
    ]
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10**9})
    text = json.dumps({"traceEvents": events})
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        file.write(text)
    (tmp_path / "trace.json").write_text(text)
    parts = parts_of_trace(tmp_path / "trace.json.gz", steps=2)
    assert parts_of_trace(tmp_path / "trace.json", steps=2) == parts
    wanted = {
        "matrix products": 35 / 2,
        "attention": 10 / 2,
        "AdamW": 20 / 2,
        "other compute": 5 / 2,
        "exposed communication": 15 / 2,
        "idle": 15 / 2,
    }
    assert parts == pytest.approx(dict.fromkeys(PARTS, 0.0) | wanted)
    assert sum(parts.values()) == pytest.approx(50)
