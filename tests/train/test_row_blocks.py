"""Runs of --zero-table-rows from their command lines."""

import re

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device
from tests.support import pretrain
from tests.train.conftest import BYTES, TINY


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


def test_blocks_have_the_decoupled_rate_beside_muon() -> None:
    """As all other parameters have that Muon does not train."""
    line = "--mock-data --train-iters 1 --device cpu --optimizer muon --decoupled-lr 1e-3".split()
    line += ["--zero-table-rows", "64", "--untie-embeddings-and-output-weights"]
    config = parse_args([*BYTES, *TINY, *line])
    engine = build_engine(config, 257, prepare_device(config, Topology()), Topology())
    for unit in engine.units:
        for placement in unit.layout.placements:
            assert placement.decoupled != bool(placement.matrices), placement.name
