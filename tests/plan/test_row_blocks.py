"""Plans of tables in blocks of rows: memory of ranks that reduce a tied table's gradient place by place."""

from typing import Any

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.row_blocks import PLAIN, RowBlockComponents
from megatron_zpp.plan.activations import loss_bytes
from megatron_zpp.plan.memory import memory_of
from tests.plan.jobs import job_of
from tests.plan.test_memory import BF16, FP32, SHAPE, WIDE, allocated_at_most, peak_of
from tests.zero.engines import engine_of
from tests.zero.quantizing import operations
from tests.zero.ranks import on_ranks
from tests.zero.test_closed_forms import live_bytes

VOCAB, MODEL = 8000, ModelConfig(**SHAPE | {"seq_length": WIDE["seq_length"]})  # parameters decide
TABLE = 2 * 8064 * MODEL.hidden_size  # bytes in bf16


def zero_of(rows: int | None) -> dict[str, Any]:
    return {"zero_stage": 3, "zero_table_rows": rows, "zero_copy_engines": "off"}


# (rows, precision, micro-batches)
CASES: list[tuple[int | None, dict[str, Any], int]] = [(None, BF16, 2), (128, BF16, 2), (500, FP32, 1)]


def peaks(topology: Topology) -> list[tuple[int, int]]:
    """(states, peak of a step above them) of each case."""
    torch.set_num_threads(1)
    found = []
    for rows, precision, micro_batches in CASES:
        engine = engine_of(
            MODEL,
            VOCAB,
            zero=ZeroConfig(**zero_of(rows)),
            precision=PrecisionConfig(**precision),
            topology=topology,
            operations=operations(),
        )
        tokens = torch.randint(VOCAB, (1, MODEL.seq_length + 1))
        allocated_at_most(engine, tokens, micro_batches)
        states = live_bytes(engine)
        found.append((states, allocated_at_most(engine, tokens, micro_batches)))
        engine.close()
    return found


def test_no_rank_holds_the_gradient_of_a_tied_table() -> None:
    """The peak with blocks is lower by more than that gradient, and as planned within 5%."""
    for (_, whole), *in_blocks in on_ranks(2, peaks, ranks_per_node=2):
        assert in_blocks[0][1] < whole - TABLE
        for (rows, precision, micro_batches), (states, peak) in zip(CASES[1:], in_blocks, strict=True):
            job = job_of(
                MODEL,
                VOCAB,
                zero=zero_of(rows),
                precision=PrecisionConfig(**precision),
                local=2,
                micro_batches=micro_batches,
            )
            planned = memory_of(job)
            assert planned.resident == pytest.approx(states, rel=1e-3)
            assert planned.peak - planned.resident == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("vocab", [4000, 8000])
@pytest.mark.parametrize(("precision", "rows"), [(FP32, 512), (FP32, 1000), (BF16, 512)], ids=str)
def test_the_loss_takes_what_the_plan_says(precision: dict[str, Any], rows: int, vocab: int) -> None:
    """Within 5%."""
    model, zero = ModelConfig(**SHAPE | {"hidden_size": 64, "seq_length": 256}), {"zero_table_rows": rows}
    job = job_of(model, vocab, zero=zero, precision=PrecisionConfig(**precision), micro_batch_size=2)
    output = RowBlockComponents(rows=rows).output(64, job.entries).to(job.dtype)
    x = torch.randn(512, 64).to(job.dtype).requires_grad_()
    for parameter in output.parameters():  # as an engine takes them
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    targets = torch.randint(vocab, (512,))
    peak = peak_of(lambda: output.loss(x, targets, vocab, PLAIN).backward())
    assert loss_bytes(job) == pytest.approx(peak, rel=0.05)
