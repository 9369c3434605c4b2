"""When a plan recommends tables in blocks of rows, and that the run can have the blocks."""

import dataclasses
import math
import re
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.plan.advice import Plan, plan_of
from megatron_zpp.plan.fitting import in_row_blocks, suggested_rows, table_advice, ways_to_fit
from megatron_zpp.plan.hardware import USABLE, machine
from megatron_zpp.plan.job import Job
from tests.plan.jobs import NO_DROPOUT, job_of
from tests.zero.engines import engine_of

SMALL = ModelConfig(model_preset="1.3b", **NO_DROPOUT)
RATES = machine(PlanConfig(dry_run=True, plan_gpu="h200", plan_link_gbit=400), "bfloat16")
GRID = {"nodes": 2, "local": 8}
LARGE = 256_000
PLENTY = 1000.0  # GiB


def plan(vocab_size: int, model: ModelConfig = SMALL, **settings: Any) -> Plan:
    return plan_of("", job_of(model, vocab_size, **{"zero": {"zero_stage": 3}, **GRID, **settings}), RATES)


def room_for(peak: int) -> float:
    """GiB of a GPU that a peak of so many bytes just fits."""
    return (peak + 1) / USABLE / 2**30


def blocks_of(job: Job) -> list[tuple[int, ...]]:
    """The shapes of the blocks of the table of tokens."""
    names = [name for name, _ in job.units]
    return [
        tuple(module.weight.shape)
        for name, module in job.units[: names.index("layers.0")]
        if name == "embedding.tokens"
    ]


def test_blocks_are_recommended_where_they_alone_make_the_run_fit() -> None:
    whole = plan(LARGE)
    rows = suggested_rows(whole.job)
    flag = f"--zero-table-rows {rows}"
    blocks = plan_of("", in_row_blocks(whole.job, rows), RATES)
    for gibibytes in (room_for(blocks.memory.peak), room_for(whole.memory.peak) - 0.01):
        assert not whole.fits(gibibytes)
        assert table_advice(whole, RATES, gibibytes).startswith(f"{flag} would lower the peak to ")
    assert (
        table_advice(whole, RATES, room_for(blocks.memory.peak) - 0.01) is None
    )  # nor does it fit with them
    ways = {way.name: way for way in ways_to_fit(whole.job, RATES)}
    assert ways[flag].memory == blocks.memory
    assert ways["all of these"].memory.peak == min(way.memory.peak for way in ways.values())
    assert ways["all of these"].job.zero.zero_table_rows == rows
    largest = max(layout.numel for layout in ways["all of these"].job.layouts)
    assert largest < LARGE * SMALL.hidden_size / 10  # no unit is the table


def test_the_price_is_what_the_plan_of_the_blocks_says() -> None:
    whole = plan(LARGE)
    blocks = plan_of("", in_row_blocks(whole.job, suggested_rows(whole.job)), RATES)
    said = re.fullmatch(
        r"\S+ \d+ would lower the peak to ([\d.]+) GiB, for a fourth product with the output weights and "
        r"([\d.]+) GB per step from each node instead of ([\d.]+): ([\d,.]+) ms per step, not ([\d,.]+)",
        table_advice(whole, RATES, PLENTY),
    )
    peak, more, sent, after, before = (float(figure.replace(",", "")) for figure in said.groups())
    assert peak == pytest.approx(blocks.memory.peak / 2**30, abs=0.006)
    assert (more, sent) == pytest.approx([each.sent.inter / 2e9 for each in (blocks, whole)], rel=0.005)
    assert more > sent
    assert (after, before) == pytest.approx([1e3 * each.time.seconds for each in (blocks, whole)], abs=0.06)
    alone = plan(LARGE, nodes=1, local=8)
    assert "GB per step" not in table_advice(alone, RATES, PLENTY)  # nothing is sent between nodes


def test_a_run_that_fits_is_advised_only_if_its_peak_is_much_lower() -> None:
    """Where sharded states or activations are the most of a GPU's memory, a table's buffers are little."""
    assert table_advice(plan(LARGE), RATES, PLENTY) is not None
    full = plan(LARGE, micro_batch_size=32)
    rows = suggested_rows(full.job)
    blocks = plan_of("", in_row_blocks(full.job, rows), RATES)
    assert 0.9 * full.memory.peak < blocks.memory.peak < full.memory.peak
    assert table_advice(full, RATES, PLENTY) is None
    assert table_advice(full, RATES, room_for(blocks.memory.peak)) is not None  # the difference decides


def test_a_table_smaller_than_a_layer_stays_whole_and_tensor_ranks_have_no_blocks() -> None:
    """A layer of this model has 12 × 2048² parameters: as many as 24,576 rows."""
    assert suggested_rows(plan(24_000).job) is None
    assert suggested_rows(plan(25_200).job) is not None
    assert suggested_rows(plan(LARGE, tensor=2).job) is None
    assert suggested_rows(plan(LARGE, zero={"zero_stage": 3, "zero_table_rows": 5000}).job) is None
    assert not any("rows" in way.name for way in ways_to_fit(plan(LARGE, tensor=2).job, RATES))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("vocab_size", [30_000, 128_256, LARGE, 262_143])
def test_blocks_make_up_the_table_with_units_of_about_a_third_of_a_layer(vocab_size: int, stage: int) -> None:
    """Whole tiles of products; equal blocks, or a smaller one behind them."""
    job = plan(vocab_size, zero={"zero_stage": stage, "zero_unit": "sublayer"}).job
    rows = suggested_rows(job)
    blocks = blocks_of(in_row_blocks(job, rows))
    width, third = SMALL.hidden_size, 4 * SMALL.hidden_size
    assert sum(count for count, _ in blocks) == job.padded_vocab_size
    assert all(shape == (rows, width) for shape in blocks[:-1])
    assert 0 < blocks[-1][0] <= rows
    assert rows % 64 == 0
    assert third / 2 < rows < third + 64


def test_an_engine_accepts_what_is_suggested() -> None:
    model = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=8, **NO_DROPOUT)
    for vocab_size in (1000, 1500, 3001):
        job = job_of(model, vocab_size)
        zero = dataclasses.replace(ZeroConfig(), zero_table_rows=suggested_rows(job))
        engine = engine_of(model, vocab_size, zero=zero)
        tokens = torch.randint(vocab_size, (1, 9))
        engine.accumulate(tokens, index=0, micro_batches=1)
        assert math.isfinite(engine.step(1e-3).grad_norm)
        engine.close()
