"""What a stage must cost in memory and traffic: closed forms that share no code with the communication plan.

`model_state_bytes` of benchmarks/memory_table.py is the closed form of the states without buffers.
"""

from collections import Counter
from collections.abc import Sequence

from megatron_zpp.placement import Layout

PARAMETER_BYTES = 2  # as they compute, and gradients as they are made


def arena_bytes(
    layouts: Sequence[Layout],
    stage: int,
    *,
    prefetch: int,
    reduce_bytes: int = 4,
    nodes: int = 1,
) -> int:
    """Bytes of the buffers that units share: slots of gathered parameters, and what reductions need.

    Slots for parameters exist beside the states at stage 3 alone; below it the parameters are the slots.
    `reduce_bytes` is the size of a gradient as it is sent; sums of a node are fp32. The gradients of two
    units of a layout can be on their way; at stage 0 only as they are made, since sums over micro-batches are
    where the result goes. Where there are other ranks a unit's are sent from a buffer, and there is room to
    receive. GPUs that write each other's memory need the room alone: their gradients are sent from where they
    are made.
    """
    total = 0
    for layout, units in Counter(layouts).items():
        if stage >= 3:
            total += slots(units, prefetch) * layout.numel * PARAMETER_BYTES
        total += min(2, units) * layout.numel * (reduce_bytes if stage > 0 else PARAMETER_BYTES)
    if layouts[0].shards > 1:
        total += max(layout.numel for layout in layouts) * reduce_bytes
    return total + reduction_bytes(layouts, nodes, reduce_bytes=reduce_bytes, sum_bytes=4)


def reduction_bytes(layouts: Sequence[Layout], nodes: int, *, reduce_bytes: int, sum_bytes: int) -> int:
    """Buffers in which reductions of unquantised gradients receive, one unit at a time.

    In two hops: what the ranks of the node send, two units' sums and what two hops 2 receive, in turn, and an
    fp32 sum before it is rounded to less.
    """
    local = layouts[0].shards // nodes
    shard = max(layout.shard_numel for layout in layouts)
    if min(nodes, local) > 1:
        exact = 4 * nodes * shard if sum_bytes < 4 else 0
        return nodes * local * shard * reduce_bytes + 4 * nodes * shard * sum_bytes + exact
    return nodes * local * shard * reduce_bytes if nodes * local > 1 else 0


def slots(units: int, prefetch: int) -> int:
    """Parameter slots that so many units of one layout share at stage 3."""
    return min(prefetch + 1, units)


def gathers_per_step(units: int, stage: int, accumulation: int, *, prefetch: int) -> int:
    """How many times a step gathers one of `units` units of equal layout.

    At stage 3 a pass finds the last units of the pass before still in their slots: forward and backward of
    every micro-batch gather the others, and only the first forward after an optimizer step gathers all.
    """
    if stage == 0:
        return 0
    if stage < 3:
        return units
    return units + (2 * accumulation - 1) * (units - slots(units, prefetch))


def bytes_sent_per_step(
    layouts: Sequence[Layout],
    stage: int,
    accumulation: int,
    *,
    prefetch: int,
    reduce_bytes: int = 4,
    nodes: int = 1,
    sum_bytes: int = 4,
) -> int:
    """Bytes that each rank sends in one step, all links together.

    A gather sends the rank's share of a unit d - 1 times; at stage 0 sums are gathered, in fp32.
    `reduce_bytes` is the size of a gradient as it is sent, `sum_bytes` that of a node's sum. Those of a
    step's only micro-batch are sent in the format of the parameters, as they are made, if it is smaller.
    """
    total, sent_bytes = 0, min(reduce_bytes, PARAMETER_BYTES) if accumulation == 1 else reduce_bytes
    for layout, units in Counter(layouts).items():
        share = (layout.shards - 1) * layout.shard_numel
        sizes = {"reduce_bytes": reduce_bytes, "sum_bytes": sum_bytes, "sent_bytes": sent_bytes}
        reduced = sum(reduction_sends(layout, nodes, **sizes)) + (share * 4 if stage == 0 else 0)
        gathers = gathers_per_step(units, stage, accumulation, prefetch=prefetch)
        total += share * gathers * PARAMETER_BYTES + units * (accumulation if stage >= 2 else 1) * reduced
    return total


def reduction_sends(
    layout: Layout, nodes: int, *, reduce_bytes: int, sum_bytes: int, sent_bytes: int | None = None
) -> tuple[int, int]:
    """Bytes that each rank sends to reduce a unit's gradients as they are: in its node, to other nodes.

    `sent_bytes` is the size of those of a step's only micro-batch, which stage 1 sends as they are made.
    """
    local, shard, sent = layout.shards // nodes, layout.shard_numel, sent_bytes or reduce_bytes
    if min(nodes, local) > 1:
        return (local - 1) * nodes * shard * sent, (nodes - 1) * shard * sum_bytes
    return (local - 1) * shard * sent, (nodes - 1) * local * shard * sent
