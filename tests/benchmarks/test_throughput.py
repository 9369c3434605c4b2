"""Command lines of the throughput benchmark: a run that its program refuses would be found on the GPUs."""

import json
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.plain_training import KINDS
from benchmarks.throughput import OURS, command, shape_of, summary
from megatron_zpp.config.root import parse_args


@pytest.mark.parametrize("run", OURS)
def test_the_flags_of_our_runs_are_accepted(run: str) -> None:
    options = Namespace(seq_length=2048, vocab_size=50304, log_interval=10, steps=40, gpus=2, extra=[])
    argv = command(run, shape_of("6.7b:8"), options, Path("metrics.jsonl"))
    config = parse_args(argv[argv.index("pretrain_gpt.py") + 1 :])
    assert config.overlaps_exchanges("cuda") == ("waiting" not in run and "fp8" not in run)


def test_ratios_are_means_of_rounds_with_intervals() -> None:
    options = Namespace(seq_length=1024, vocab_size=50304, gpus=2)
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


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "torchao" not in kind and "dtensor" not in kind])
def test_peers_train(kind: str, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100"
    steps = "--micro-batch-size 2 --steps 30 --log-interval 10"
    argv = ["benchmarks/plain_training.py", "--kind", kind, "--metrics-file", str(metrics)]
    subprocess.run([sys.executable, *argv, *f"{shape} {steps}".split()], check=True, timeout=300)
    losses = [json.loads(line)["lm_loss"] for line in metrics.read_text().splitlines()]
    assert losses == pytest.approx(3 * [math.log(100)], abs=0.1)  # tokens are random
