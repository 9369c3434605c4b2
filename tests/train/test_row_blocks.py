"""Runs of --zero-table-rows from their command lines."""

import re

import pytest

from megatron_zpp.config.root import parse_args
from tests.support import pretrain

RUN = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 3 --hidden-size 32 --bf16 "
    "--num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-3 --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --zero-stage 3 "
    "--zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients "
    "--recompute-granularity full --recompute-method uniform"
).split()
BLOCKS = ("--zero-table-rows", "60")


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
