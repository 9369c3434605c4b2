"""Runs of --zero-table-rows from their command lines."""

import re

from tests.support import pretrain


def test_a_dry_run_plans_blocks() -> None:
    """A large vocabulary's arena shrinks to that of a small one."""
    flags = (
        "--dry-run --zero-stage 3 --model-preset 1.3b --vocab-size 256000 --global-batch-size 704 "
        "--plan-nodes 2 --plan-gpus-per-node 8 --plan-link-gbit 100"
    ).split()
    whole, blocks = pretrain(*flags), pretrain(*flags, "--zero-table-rows", "8192")
    assert "tables in units of 8192 rows" in blocks.stdout, blocks.stderr
    before, after = (
        float(re.search(r"buffers of gathers and reductions +(\S+)", done.stdout)[1])
        for done in (whole, blocks)
    )
    assert after < 0.3 * before
