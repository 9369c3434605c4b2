"""What a stage must cost in memory and traffic: closed forms, to plan with and to hold the engine to.

Psi is the number of parameters, d of ranks (ZeRO paper, section 5 and figure 1). The moments and the master
weights take 12 bytes a parameter, the compute-precision parameters 2 (4 in fp32, where they are the master
weights themselves), accumulated gradients 4 here and 2 in the paper.
"""

from collections import Counter
from collections.abc import Sequence

from megatron_zpp.zero.flat_layout import FlatLayout

OPTIMIZER_BYTES = 12  # a parameter: fp32 master, first moment, second moment


def model_state_bytes(
    parameters: int, ranks: int, stage: int, *, parameter_bytes: int = 2, gradient_bytes: int = 4
) -> float:
    """Bytes of model states on each rank, without padding and buffers."""
    shares = [ranks if stage >= first else 1 for first in (3, 2, 1)]  # parameters, gradients, optimizer
    costs = (parameter_bytes, gradient_bytes, OPTIMIZER_BYTES)
    return parameters * sum(cost / share for cost, share in zip(costs, shares, strict=True))


def arena_bytes(
    layouts: Sequence[FlatLayout],
    stage: int,
    *,
    prefetch: int,
    parameter_bytes: int = 2,
    reduce_bytes: int = 4,
) -> int:
    """Bytes of the buffers that units share: slots of gathered parameters, and what reductions need.

    Slots for parameters exist beside the states at stage 3 alone; below it the parameters are the slots.
    `reduce_bytes` is the size of a gradient as it is sent. An all-to-all (stage 1 and up) receives one unit
    at a time; an all-reduce (stage 0) sends fp32 sums from where they are.
    """
    total = 0
    for layout, units in Counter(layouts).items():
        if stage >= 3:
            total += slots(units, prefetch) * layout.numel * parameter_bytes
        if stage >= 1 or reduce_bytes != 4:
            total += min(2, units) * layout.numel * reduce_bytes
    if stage >= 1 and layouts[0].ranks > 1:
        total += max(layout.numel for layout in layouts) * reduce_bytes
    return total


def slots(units: int, prefetch: int) -> int:
    """Parameter slots that so many units of one layout share at stage 3."""
    return min(prefetch + 1, units)


def gathers_a_step(units: int, stage: int, accumulation: int, *, prefetch: int) -> int:
    """How many times a step gathers one of `units` units of equal layout.

    At stage 3 a pass finds the last units of the pass before still in their slots: forward and backward of
    every micro-batch gather the others, and only the first forward after an optimizer step gathers all.
    """
    if stage == 0:
        return 0
    if stage < 3:
        return units
    return units + (2 * accumulation - 1) * (units - slots(units, prefetch))


def bytes_sent_a_step(
    layouts: Sequence[FlatLayout],
    stage: int,
    accumulation: int,
    *,
    prefetch: int,
    parameter_bytes: int = 2,
    reduce_bytes: int = 4,
) -> int:
    """Bytes that each rank sends in one step, all links together.

    A gather and a reduce-scatter each send the rank's share of a unit d - 1 times; an all-reduce is both.
    `reduce_bytes` as in `arena_bytes`.
    """
    total = 0
    for layout, units in Counter(layouts).items():
        share = (layout.ranks - 1) * layout.shard_numel
        reductions = units * (accumulation if stage >= 2 else 2 if stage == 0 else 1)
        gathers = gathers_a_step(units, stage, accumulation, prefetch=prefetch)
        total += share * (gathers * parameter_bytes + reductions * reduce_bytes)
    return total
