"""Command lines of the throughput benchmark: a run that its program refuses would be found on the GPUs."""

from argparse import Namespace

import pytest

from benchmarks.throughput import PARTS, command, rates, shape_of, summary
from megatron_zpp.config.root import parse_args


@pytest.mark.parametrize(
    "run", [*sorted(PARTS.keys() - {"fp8 output"}), "stage 3, tensor, fp8 codes, fp8 output"]
)
def test_the_flags_of_our_runs_are_accepted(run: str) -> None:
    size = {"seq_length": 2048, "vocab_size": 50304, "log_interval": 10, "steps": 40, "gpus": 2}
    options = Namespace(**size, micro_batches=8, recompute=run.startswith("context"), extra=[])
    argv = command(run, shape_of("llama3.1-8b/8:8"), options)
    parse_args(argv[argv.index("pretrain_gpt.py") + 1 :])


def test_ratios_are_means_of_rounds_with_intervals() -> None:
    options = Namespace(seq_length=1024, vocab_size=50304, gpus=2, micro_batches=1, extra=[])
    rounds = {
        run: [{"milliseconds": value, "first_line_seconds": None} for value in values]
        for run, values in {"stage 3": (10.0, 10.0), "fsdp2": (30.0, 40.0), "dtensor": (20.0, 20.0)}.items()
    }
    rounds["dtensor"].append({"failed": "out of memory"})
    found = summary(rounds, shape_of("345m:8"), options)
    mean, half = found["stage 3"]["rate_over_fsdp2"]
    assert mean == 3.5
    assert half == pytest.approx(0.5 * 12.706, rel=1e-3)  # Student's t for two rounds
    assert found["stage 3"]["rate_over_dtensor"] == [4.0, 0.0]  # two GPUs share a micro-batch of dtensor's


def test_sizes_among_further_flags_are_counted() -> None:
    options = Namespace(seq_length=1024, vocab_size=50304, gpus=1, micro_batches=1, extra=[])
    fewer = Namespace(**vars(options) | {"extra": ["--swiglu", "--num-layers", "8"]})
    expected = rates("stage 0", 100.0, shape_of("1.3b/8:4"), options)
    assert rates("stage 0", 100.0, shape_of("1.3b:4"), fewer) == expected
