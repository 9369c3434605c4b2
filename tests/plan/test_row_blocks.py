"""Plans of tables in blocks of rows: their memory on ranks, and which blocks a plan suggests."""

import math
from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.loss import Objective
from megatron_zpp.model.row_blocks import PLAIN, OutputBlock, OutputBlocks
from megatron_zpp.model.row_blocks import blocks_of as blocks_of_table
from megatron_zpp.plan.activations import loss_bytes
from megatron_zpp.plan.hardware import USABLE, machine
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.search import search
from megatron_zpp.plan.space import suggested_rows, with_units
from tests.plan.jobs import FULL, NO_DROPOUT, engine_of, job_of
from tests.plan.test_memory import BF16, FP32, SHAPE, WIDE, allocated_at_most, peak_of
from tests.support import nightly
from tests.zero.ranks import on_ranks
from tests.zero.test_closed_forms import live_bytes

VOCAB, MODEL = 8000, ModelConfig(**SHAPE | {"seq_length": WIDE["seq_length"]})  # parameters decide
TABLE = 2 * 8064 * MODEL.hidden_size  # bytes in bf16


def zero_of(rows: int | None) -> dict[str, Any]:
    return {"zero_stage": 3, "zero_table_rows": rows}


# (rows, precision, micro-batches)
CASES: list[tuple[int | None, dict[str, Any], int]] = [(None, BF16, 2), (128, BF16, 2), (500, FP32, 1)]


def job_of_case(rows: int | None, precision: dict[str, Any], micro_batches: int) -> Job:
    grid: dict[str, Any] = {"local": 2, "micro_batches": micro_batches, "copy_engines": False}
    return job_of(MODEL, VOCAB, zero=zero_of(rows), precision=PrecisionConfig(**precision), **grid)


def peaks(topology: Topology) -> list[tuple[int, int]]:
    """(states, peak of a step above them) of each case."""
    found = []
    for case in CASES:
        engine = engine_of(job_of_case(*case), topology)
        tokens = torch.randint(VOCAB, (1, MODEL.seq_length + 1))
        peak = allocated_at_most(engine, tokens, case[2])
        found.append((live_bytes(engine), peak))
        engine.close()
    return found


def test_no_rank_holds_the_gradient_of_a_tied_table() -> None:
    """The peak with blocks is lower by more than that gradient, and as planned within 5%."""
    for (_, whole), *in_blocks in on_ranks(2, peaks, ranks_per_node=2):
        assert in_blocks[0][1] < whole - TABLE
        for case, (states, peak) in zip(CASES[1:], in_blocks, strict=True):
            planned = memory_of(job_of_case(*case))
            assert planned.resident == pytest.approx(states, rel=1e-3)
            assert planned.peak - planned.resident == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("cap", [nightly(None), 30.0])
@pytest.mark.parametrize(("precision", "rows", "vocab"), [(FP32, 1000, 8000), (BF16, 512, 4000)], ids=str)
def test_the_loss_takes_what_the_plan_says(
    precision: dict[str, Any], rows: int, vocab: int, cap: float | None
) -> None:
    """Within 5%."""
    model = ModelConfig(**SHAPE | {"hidden_size": 64, "seq_length": 256}, final_logit_softcapping=cap)
    zero = {"zero_table_rows": rows}
    job = job_of(model, vocab, zero=zero, precision=PrecisionConfig(**precision), micro_batch_size=2)
    output = OutputBlocks(blocks_of_table(OutputBlock, job.entries, 64, rows)).to(job.dtype)
    x = torch.randn(512, 64).to(job.dtype).requires_grad_()
    for parameter in output.parameters():  # as an engine takes them
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    targets = torch.randint(vocab, (512,))
    peak = peak_of(lambda: output.loss(x, targets, Objective(vocab, cap), PLAIN).backward())
    assert loss_bytes(job) == pytest.approx(peak, rel=0.05)


BILLION = ModelConfig(model_preset="1.3b", **NO_DROPOUT)
RATES = machine(PlanConfig(dry_run=True, plan_gpu="h200", plan_link_gbit="400"), "bfloat16")
LARGE = 256_000


def billion(vocab_size: int, **settings: Any) -> Job:
    """1.3B on two nodes."""
    return job_of(BILLION, vocab_size, **{"zero": {"zero_stage": 3}, "nodes": 2, "local": 8, **settings})


def blocks_of(job: Job) -> list[tuple[int, ...]]:
    """The shapes of the blocks of the table of tokens."""
    names = [name for name, _ in job.units]
    before = job.units[: names.index("layers.0")]
    return [tuple(module.weight.shape) for name, module in before if name == "embedding.tokens"]


def test_blocks_and_sublayers_are_taken_where_nothing_fits_without_them() -> None:
    job = billion(LARGE, nodes=8, local=1, recompute=FULL)
    units = {"zero_unit": "sublayer", "zero_table_rows": suggested_rows(job)}
    whole, cut = (memory_of(one).peak for one in (job, with_units(job, **units)))
    room = (whole + cut) / 2 / 2**30 / USABLE
    best = search(job, RATES, room).best
    assert best.fits(room)
    assert best.job.zero.zero_table_rows == suggested_rows(job)
    assert best.job.zero.cuts_layers
    assert max(layout.numel for layout in best.job.layouts) < LARGE * BILLION.hidden_size / 10


def test_a_table_smaller_than_a_layer_stays_whole_and_tensor_ranks_have_no_blocks() -> None:
    """A layer of this model has 12 × 2048² parameters: as many as 24,576 rows."""
    assert suggested_rows(billion(24_000)) is None
    assert suggested_rows(billion(25_200)) is not None
    assert suggested_rows(billion(LARGE, tensor=2)) is None
    assert suggested_rows(billion(LARGE, zero={"zero_stage": 3, "zero_table_rows": 5000})) is None


@pytest.mark.parametrize("vocab_size", [30_000, 128_256, 262_143])
def test_blocks_make_up_the_table_with_units_of_about_a_third_of_a_layer(vocab_size: int) -> None:
    """Whole tiles of products; equal blocks, or a smaller one behind them."""
    job = billion(vocab_size, zero={"zero_stage": 3, "zero_unit": "sublayer"})
    rows = suggested_rows(job)
    blocks = blocks_of(with_units(job, zero_table_rows=rows))
    width, third = BILLION.hidden_size, 4 * BILLION.hidden_size
    assert sum(count for count, _ in blocks) == job.padded_vocab_size
    assert all(shape == (rows, width) for shape in blocks[:-1])
    assert 0 < blocks[-1][0] <= rows
    assert rows % 64 == 0
    assert third / 2 < rows < third + 64


def test_an_engine_accepts_what_is_suggested() -> None:
    model = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=8, **NO_DROPOUT)
    for vocab_size in (1000, 3001):
        job = job_of(model, vocab_size)
        engine = engine_of(with_units(job, zero_table_rows=suggested_rows(job)))
        engine.accumulate(torch.randint(vocab_size, (1, 9)))
        assert math.isfinite(engine.step(1e-3).grad_norm)
        engine.close()
