"""Command lines of the throughput benchmark: a run that its program refuses would be found on the GPUs."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.throughput import OURS, command, shape_of
from megatron_zpp.config.root import parse_args


@pytest.mark.parametrize("run", OURS)
def test_the_flags_of_our_runs_are_accepted(run: str) -> None:
    options = Namespace(seq_length=2048, vocab_size=50304, log_interval=10, steps=40, gpus=2, extra=[])
    argv = command(run, shape_of("6.7b:8"), options, Path("metrics.jsonl"))
    config = parse_args(argv[argv.index("pretrain_gpt.py") + 1 :])
    assert config.overlaps_exchanges("cuda") == ("waiting" not in run and "fp8" not in run)
