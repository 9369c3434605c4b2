"""Planned steps with 8-bit products, against those that were measured."""

import json
import re
from pathlib import Path

import pytest

from tests.support import pretrain

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CODES = "--fp8 --fp8-recipe delayed --fp8-param-gather".split()
COMMON = "--dry-run --plan-gpu h200 --zero-stage 0 --bf16 --mock-data --tokenizer-type NullTokenizer".split()
COMMON += "--vocab-size 50304 --seq-length 1024 --train-iters 10 --lr 1e-4".split()


@pytest.mark.parametrize("shape", ["1.3b:16", "2.7b:16", "6.7b:8"])
def test_a_planned_step_with_codes_is_as_much_faster_as_a_real_one(shape: str) -> None:
    """Within 4%: the three shapes share two numbers, and repeated runs vary by 1%."""
    model, micro_batch = shape.split(":")
    result = json.loads((RESULTS / f"throughput_fp8_{model}.json").read_text())["figures"][shape]
    measured = result["stage 0, fp8 codes"]["milliseconds"] / result["stage 0"]["milliseconds"]
    planned = {}
    for name, flags in (("bf16", []), ("codes", CODES)):
        done = pretrain(*COMMON, "--model-preset", model, "--micro-batch-size", micro_batch, *flags)
        assert done.returncode == 0, done.stderr
        found = re.search(r"a step takes ([\d.,]+) ms", done.stdout)
        assert found, done.stdout
        planned[name] = float(found[1].replace(",", ""))
    assert planned["codes"] / planned["bf16"] == pytest.approx(measured, rel=0.04)
