"""Units that each node holds by itself: sharded inside nodes alone, with routes of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero.engines import weights_of
from tests.zero.ranks import on_ranks
from tests.zero.test_differences import train
from tests.zero.zeropp_engines import AUTO, FOUR_BITS, HPZ, QGZ, QWZ, build

INSIDE = ("layers.1", "layers.2", "head")


def states(engine: ZeroEngine) -> list[Tensor]:
    return [shard.clone() for kind in engine.states.kinds for shard in engine.states.shards(kind)]


def both_ways(topology: Topology, zero: dict[str, Any], directory: str) -> tuple[bool, bool, bool, int, int]:
    """Whether norms and states are those of ordinary units, also after each has loaded the other; bytes."""
    found, sent = [], []
    for inside in ((), INSIDE):
        engine = build(topology, zero, inside_nodes=inside)
        norms = train(engine, range(2))
        path = save(Path(directory, str(len(inside))), engine, Progress(iteration=2))
        other = build(topology, zero, inside_nodes=INSIDE if not inside else ())
        load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
        engine.take_traffic()
        more = train(engine, range(2, 3)), train(other, range(2, 3))
        sent.append(engine.take_traffic()[1])
        found.append((norms, more, states(engine), states(other)))
    (norms, more, own, loaded), (their_norms, their_more, theirs, their_loaded) = found
    same = [all(map(torch.equal, own, others)) for others in (loaded, theirs, their_loaded)]
    return norms == their_norms and more == their_more, more[0] == more[1], all(same), *sent


@pytest.mark.parametrize(
    ("zero", "local"),
    [
        ({"zero_stage": 1}, 1),
        nightly({"zero_stage": 1}, 2),
        nightly({}, 1),
        ({}, 2),
        (QWZ | HPZ | AUTO, 2),
    ],
    ids=["stage 1, one rank", "stage 1", "stage 3, one rank", "stage 3", "int8, hpZ, accumulation"],
)
def test_a_unit_that_each_node_holds_trains_to_the_same_bits(
    zero: dict[str, Any], local: int, tmp_path: Path
) -> None:
    """Its norm counts once; it is saved, and loaded by ordinary units; other bytes cross nodes."""
    ranks = on_ranks(2 * local, both_ways, zero, str(tmp_path), ranks_per_node=local)
    for norms, resumed, same, ordinary, inside in ranks:
        assert (norms, resumed, same) == (True, True, True)
        assert inside != ordinary


def in_codes(topology: Topology, zero: dict[str, Any], directory: str) -> tuple[Any, ...]:
    ordinary = train(build(topology, zero), range(4))
    engine = build(topology, zero, inside_nodes=INSIDE)
    first = train(engine, range(2))
    path = save(Path(directory), engine, Progress(iteration=2))
    other = build(topology, zero, inside_nodes=INSIDE)
    load_checkpoint(path, other, TOKENIZER, with_optimizer=True)
    more, resumed = train(engine, range(2, 4)), train(other, range(2, 4))
    return ordinary, first + more, more, resumed, weights_of(engine)["head.norm.weight"].tolist()


@pytest.mark.parametrize("zero", [nightly(QWZ | QGZ | HPZ), FOUR_BITS | AUTO], ids=["int8", "four bits"])
def test_sums_of_gradients_cross_nodes_as_codes(zero: dict[str, Any], tmp_path: Path) -> None:
    """All ranks take what the codes stand for; a resumed run ends with the bits of one that ran on."""
    ranks = on_ranks(4, in_codes, zero, str(tmp_path), ranks_per_node=2)
    for ordinary, norms, more, resumed, weights in ranks:
        assert norms == pytest.approx(ordinary, rel=0.05)
        assert more == resumed
        assert weights == ranks[0][-1]
