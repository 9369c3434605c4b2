"""Planned steps with 8-bit products, against those that were measured."""

import json
import re
from pathlib import Path

import pytest

from tests.support import pretrain

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
OUTPUT = "--fp8-output-layer"
CODES = "--fp8 --fp8-recipe delayed --fp8-param-gather".split()
COMMON = "--dry-run --plan-gpu h200 --zero-stage 0 --bf16 --mock-data --tokenizer-type NullTokenizer".split()
COMMON += "--vocab-size 50304 --seq-length 1024 --train-iters 10 --lr 1e-4".split()


@pytest.mark.parametrize("shape", ["1.3b:16", "6.7b:8"])
def test_a_planned_step_with_codes_is_as_much_faster_as_a_real_one(shape: str) -> None:
    """Within 4%: the three shapes share two numbers, and repeated runs vary by 1%."""
    model, micro_batch = shape.split(":")
    result = json.loads((RESULTS / f"throughput_fp8_{model}.json").read_text())["figures"][shape]
    measured = result["stage 0, fp8 codes"]["milliseconds"] / result["stage 0"]["milliseconds"]
    planned = [milliseconds(model, micro_batch, *flags) for flags in ([], CODES)]
    assert planned[1] / planned[0] == pytest.approx(measured, rel=0.04)


def steps_of(name: str, *runs: str) -> list[float]:
    """The milliseconds of a step of the runs of 1.3B in a result."""
    figures = json.loads((RESULTS / f"{name}.json").read_text())["figures"]["1.3b:16"]
    return [figures[run]["milliseconds"] for run in runs]


def milliseconds(model: str, micro_batch: str, *flags: str) -> float:
    """What a step is planned to take."""
    done = pretrain(*COMMON, "--model-preset", model, "--micro-batch-size", micro_batch, *flags)
    assert done.returncode == 0, done.stderr
    assert ("the output layer's products take 0.60 of bf16's time" in done.stdout) == (OUTPUT in flags)
    found = re.search(r"a step takes ([\d.,]+) ms", done.stdout)
    assert found, done.stdout
    return float(found[1].replace(",", ""))


def test_a_planned_output_layer_of_8_bit_products_saves_as_much_as_a_real_one() -> None:
    """As a share of bf16's step, within 10%: intervals of a run differ by 0.5 ms, and it saves 6.7."""
    bf16, without, with_it = steps_of(
        "throughput_fp8_1.3b_h100", "stage 0", "stage 0, fp8 codes", "stage 0, fp8 codes and output"
    )
    plans = [milliseconds("1.3b", "16", *flags) for flags in ([], CODES, [*CODES, OUTPUT])]
    assert (plans[1] - plans[2]) / plans[0] == pytest.approx((without - with_it) / bf16, rel=0.1)
