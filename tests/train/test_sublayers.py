"""Runs of --zero-unit sublayer from their command lines."""

import json
from pathlib import Path

from megatron_zpp.generate.loading import load_model
from tests.support import pretrain

RUN = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 3 --hidden-size 32 --bf16 "
    "--num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-2 --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --zero-stage 3 "
    "--zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients "
    "--recompute-granularity full --recompute-method uniform"
).split()


def records_of(path: Path) -> list[tuple[str, float]]:
    """Losses of steps and evaluations in the order in which they were written."""
    records = map(json.loads, path.read_text().splitlines())
    return [(name, value) for record in records for name, value in record.items() if "loss" in name]


def test_a_run_may_end_with_halves_and_go_on_with_layers(tmp_path: Path) -> None:
    """All of ZeRO++ on two ranks, with evaluations; programs of one process read the checkpoint."""
    whole, parts, save = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", str(tmp_path / "checkpoints")
    done = pretrain(*RUN, "--metrics-file", str(whole), processes=2)
    assert done.returncode == 0, done.stderr
    saved = ("--metrics-file", str(parts), "--save", save, "--load", save)
    done = pretrain(*RUN, *saved, "--zero-unit", "sublayer", "--exit-interval", "2", processes=2)
    assert done.returncode == 0, done.stderr
    assert "units of sublayers" in done.stdout
    model, _ = load_model(save, 2)
    assert not model.cut_layers
    done = pretrain(*RUN, *saved, processes=2)
    assert done.returncode == 0, done.stderr
    assert records_of(parts) == records_of(whole)
