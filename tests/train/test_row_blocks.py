"""Runs of --zero-table-rows from their command lines."""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_zpp.config.root import parse_args
from megatron_zpp.generate.loading import load_model
from tests.support import pretrain

RUN = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 3 --hidden-size 32 --bf16 "
    "--num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-3 --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --zero-stage 3 "
    "--zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients "
    "--recompute-granularity full --recompute-method uniform"
).split()
BLOCKS = ("--zero-table-rows", "60")
MORE = "--untie-embeddings-and-output-weights --decoupled-lr 2e-3 --log-num-zeros-in-grad".split()


def records_of(path: Path) -> list[tuple[str, float]]:
    """Losses of steps and evaluations in the order in which they were written."""
    records = map(json.loads, path.read_text().splitlines())
    return [(name, value) for record in records for name, value in record.items() if "loss" in name]


def test_a_run_may_end_with_blocks_and_go_on_with_other_ones(tmp_path: Path) -> None:
    """All of ZeRO++ on two ranks, with evaluations; programs of one process read the checkpoint."""
    whole, parts, save = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", str(tmp_path / "checkpoints")
    done = pretrain(*RUN, *MORE, "--metrics-file", str(whole), processes=2)
    assert done.returncode == 0, done.stderr
    saved = (*MORE, "--metrics-file", str(parts), "--save", save, "--load", save)
    done = pretrain(*RUN, *saved, *BLOCKS, "--exit-interval", "2", processes=2)
    assert done.returncode == 0, done.stderr
    assert "tables in units of 60 rows" in done.stdout
    model, _ = load_model(save, 2)
    assert model.table_rows is None
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(16)[None])).all()
    done = pretrain(*RUN, *saved, "--zero-table-rows", "128", processes=2)
    assert done.returncode == 0, done.stderr
    found, expected = records_of(parts), records_of(whole)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=0.01)


def test_tensor_ranks_are_refused_with_the_flag_that_is_right() -> None:
    flags = [*RUN, *BLOCKS, "--tensor-model-parallel-size", "2"]
    with pytest.raises(
        ValueError, match=r"^--zero-table-rows 60: needs --tensor-model-parallel-size 1, not 2: "
    ):
        parse_args(flags)


@pytest.mark.parametrize("rows", ["0", "-5", "many"])
def test_blocks_have_rows(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as refused:
        parse_args([*RUN, f"--zero-table-rows={rows}"])
    assert "--zero-table-rows" in capsys.readouterr().err + str(refused.value)


def test_a_dry_run_recommends_blocks_and_plans_them() -> None:
    """A large vocabulary's arena shrinks to that of a small one, and the plan says what it is for."""
    flags = (
        "--dry-run --mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --bf16 "
        "--zero-stage 3 --model-preset 1.3b --vocab-size 256000 --micro-batch-size 1 "
        "--global-batch-size 16 --plan-nodes 2 --plan-gpus-per-node 8 "
        "--hidden-dropout 0 --attention-dropout 0"
    ).split()
    whole = pretrain(*flags)
    assert whole.returncode == 0, whole.stderr
    advised = re.search(r"advice: --zero-table-rows (\d+) would lower the peak to (\S+) GiB, ", whole.stdout)
    assert advised, whole.stdout
    blocks = pretrain(*flags, "--zero-table-rows", advised[1])
    assert blocks.returncode == 0, blocks.stderr
    assert f"tables in units of {advised[1]} rows" in blocks.stdout
    assert f"this run fits: {advised[2]} GiB" in blocks.stdout
    assert "would lower the peak" not in blocks.stdout
    before, after = (
        float(re.search(r"buffers of gathers.* (\S+)$", done.stdout, re.MULTILINE)[1])
        for done in (whole, blocks)
    )
    assert after < 0.3 * before
