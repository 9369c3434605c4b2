"""Runs of --zero-table-rows from their command lines."""

import re

from tests.support import pretrain


def test_a_dry_run_offers_blocks_and_plans_them() -> None:
    """A large vocabulary's arena shrinks to that of a small one, where the whole table does not fit."""
    flags = (
        "--dry-run --mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --bf16 "
        "--zero-stage 3 --model-preset 1.3b --vocab-size 256000 --micro-batch-size 44 "
        "--global-batch-size 704 --plan-nodes 2 --plan-gpus-per-node 8 "
        "--hidden-dropout 0 --attention-dropout 0"
    ).split()
    whole = pretrain(*flags)
    assert whole.returncode == 0, whole.stderr
    offered = re.search(r"^    --zero-table-rows (\d+) +(\S+) GiB .* fits$", whole.stdout, re.MULTILINE)
    assert offered, whole.stdout
    blocks = pretrain(*flags, "--zero-table-rows", offered[1])
    assert blocks.returncode == 0, blocks.stderr
    assert f"tables in units of {offered[1]} rows" in blocks.stdout
    assert f"this run fits: {offered[2]} GiB" in blocks.stdout
    before, after = (
        float(re.search(r"buffers of gathers.* (\S+)$", done.stdout, re.MULTILINE)[1])
        for done in (whole, blocks)
    )
    assert after < 0.3 * before
