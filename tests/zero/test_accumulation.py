"""Errors of gradients that accumulate inside nodes (--zero-gradient-partition-size)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.reductions import Hop
from megatron_zpp.exchange.route import When
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import BF16, MODEL, batch, build


def first_errors(topology: Topology, per_node: int, zero: dict[str, Any]) -> list[str]:
    """What steps of one and two micro-batches say if hop 1 of the last one fails."""
    grid = Topology(topology.rank, topology.world_size, topology.rank % per_node, per_node)
    model, said = dataclasses.replace(MODEL, num_layers=1), []
    for micro_batches in (1, 2):
        engine = build(grid, zero, BF16, model)
        *earlier, last = (batch(grid, index) for index in range(micro_batches))
        for index, tokens in enumerate(earlier):
            engine.accumulate(tokens, index=index, micro_batches=micro_batches)
        engine.take_traffic()  # what was submitted so far is done
        with pytest.MonkeyPatch.context() as patched:
            for method in ("exchange", "add_up"):
                patched.setattr(Hop, method, failing(getattr(Hop, method)))
            try:
                engine.accumulate(last, index=micro_batches - 1, micro_batches=micro_batches)
                engine.step(1e-2)
                said.append("no error")
            except OSError as error:
                said.append(str(error))
            for comm_stream in engine._communication.comm_streams:
                comm_stream.close()
    return said


def failing(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with an error at the end of hop 1, so that every rank has sent what others wait for."""

    def fails(hop: Hop, *args: Any, **kwargs: Any) -> Any:
        found = method(hop, *args, **kwargs)
        if hop.stage.when is When.MICRO_BATCH:
            raise OSError("hop 1 failed")
        return found

    return fails


def all_first_errors(topology: Topology) -> list[list[str]]:
    """In nodes of half the ranks, and in one node."""
    pairs = {"zero_stage": 2, "zero_gradient_partition_size": "2"}
    quantized, ranks = {"zero_quantized_gradients": True}, topology.world_size
    cases = [(ranks // 2, pairs), (ranks // 2, pairs | quantized), (ranks, pairs)]
    return [first_errors(topology, per_node, zero) for per_node, zero in cases]


def test_no_step_is_taken_if_hop_1_of_its_last_micro_batch_fails() -> None:
    """On CPUs an error is in the result of the work alone, which somebody has to read."""
    assert on_ranks(4, all_first_errors) == [[["hop 1 failed"] * 2] * 3] * 4
