"""A run whose nodes hold different references ends before it saves: one line, exit status 1."""

import io
from contextlib import redirect_stderr

import pytest
import torch

from megatron_zpp.config.run import TrainingConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.train.steps.stopping import Ending, Stop, StopConditions
from tests.zero.ranks import on_ranks
from tests.zero.test_differences import train
from tests.zero.zeropp_engines import FOUR_BITS, build


def damaged(topology: Topology) -> list[tuple[int, int | None, bool, str]]:
    """(iteration, exit status, whether the run saves, stderr) of each check that ended the run.

    A bit of rank 1's reference flips after the second of three steps, each of which is saved.
    """
    engine, found = build(topology, FOUR_BITS), []
    stops = StopConditions(TrainingConfig(micro_batch_size=1, train_iters=4), engine, StopSignals())
    for iteration in range(3):
        train(engine, range(iteration, iteration + 1))
        if topology.rank == 1 and iteration == 1:
            engine.evaluate(torch.zeros(2, 11, dtype=torch.long))  # waits for the exchange
            engine.units[0].reference.view(torch.int32)[3] ^= 1 << 22
        try:
            stops.before_save()
        except Stop as stop:
            said = io.StringIO()
            with redirect_stderr(said), pytest.raises(SystemExit) as exited:
                Ending(iteration, stop, lost_sinks=False).leave("pretrain_gpt.py", topology.rank)
            found.append((iteration, exited.value.code, stop.saves, said.getvalue()))
    engine.close()
    return found


def test_a_damaged_reference_ends_the_run_at_the_next_save() -> None:
    first, second = on_ranks(2, damaged, ranks_per_node=1)
    assert [check[:3] for check in first] == [check[:3] for check in second] == [(1, 1, False), (2, 1, False)]
    said = first[0][3]
    assert said.startswith(
        "pretrain_gpt.py: error: iteration 1: the reference of weight differences is not that of node 0 in "
        "unit 0 (with "
    )
    assert " on ranks 1: memory or the network changed it; nothing is saved; resume from" in said
    assert (said.count("\n"), second[0][3]) == (1, "")  # rank 0 speaks for all
