"""Chooses, once, how the weights and gradients of a run travel."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.config.options import refusal
from megatron_zpp.config.zero import GRADIENT_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.ops.formats import Format
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives import Gather, PlainGather, PlainReduction, Reduction, TwoHopReduction
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.lane import Lane
from megatron_zpp.zero.quantized_collectives import QuantizedGather, QuantizedReduction
from megatron_zpp.zero.theory import sums_inside_nodes, whole_sums
from megatron_zpp.zero.topology import Topology


def check_topology(zero: ZeroConfig, topology: Topology) -> None:
    """Raises ValueError, with the sizes that would do, for ZeRO++ flags that these ranks cannot obey."""
    zero.hpz_ranks(topology.local_world_size, topology.nodes)
    if zero.zero_gradient_error_feedback and min(topology.nodes, topology.local_world_size) < 2:
        raise refusal(
            "--zero-gradient-error-feedback",
            "(given)",
            "needs a second hop, so 2 or more nodes of 2 or more ranks; this run has "
            f"{topology.nodes} × {topology.local_world_size}",
        )


@dataclass(frozen=True, kw_only=True)
class SecondaryShards:
    """hpZ: what a group of `ranks` keeps of the weights between the gathers of a step, and how it gathers."""

    lane: Lane
    gather: Gather
    ranks: int
    codes: Format | None  # None: weights in `dtype`
    dtype: torch.dtype

    def new(self, layout: FlatLayout) -> Tensor:
        """A buffer for this rank's part of a unit."""
        if self.codes is None:
            return self.lane.zeros(layout.numel // self.ranks, self.dtype)
        messages = layout.ranks // self.ranks
        return self.lane.zeros(messages * self.codes.message_bytes(layout.shard_numel), torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What a run's weights and gradients go through."""

    lanes: tuple[Lane, ...]
    filling: Lane  # of those that gather weights, the one that moves them into parameter slots best
    gather: Gather
    weight_format: Format | None  # qwZ
    secondary: SecondaryShards | None
    reduction: Reduction


def build_communication(
    zero: ZeroConfig,
    topology: Topology,
    make_lane: Callable[[Iterable[int]], Lane],
    layouts: Sequence[FlatLayout],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    operations: Operations | None,
) -> Communication:
    """Weights travel in `dtype` or as codes, gradients in `reduce_dtype` or as codes.

    Sums over a node of gradients that are not codes travel in `sum_dtype`. Codes need `operations`. Every
    rank makes the same lanes in the same order.
    """
    everyone = range(topology.world_size)
    group = zero.hpz_ranks(topology.local_world_size, topology.nodes)
    place = topology.rank % group

    def gather_on(lane: Lane, codes: Format | None) -> Gather:
        if codes is None:
            return PlainGather(lane, dtype, place)
        return QuantizedGather(lane, operations, codes, layouts, place)

    weight_format = None
    if zero.zero_quantized_weights:
        weight_format = Format(
            zero.zero_quantized_weights_format, zero.zero_quantization_block or WEIGHT_BLOCK
        )
    gathering = make_lane(everyone)
    lanes = [gathering]
    secondary = None
    filling = gathering
    if zero.hpz:
        inside = gathering
        if group < topology.world_size:
            inside = make_lane(topology.neighbours(group))
            lanes.append(inside)
        codes = weight_format if zero.zero_hpz_secondary == "quantized" else None
        secondary = SecondaryShards(
            lane=inside, gather=gather_on(inside, codes), ranks=group, codes=codes, dtype=dtype
        )
        if weight_format is not None or not gathering.copies:
            filling = inside
    reduction_lanes, reduction = _reduction(
        zero,
        topology,
        make_lane,
        layouts,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        sum_dtype=sum_dtype,
        operations=operations,
    )
    return Communication(
        lanes=(*lanes, *reduction_lanes),
        filling=filling,
        gather=gather_on(gathering, weight_format),
        weight_format=weight_format,
        secondary=secondary,
        reduction=reduction,
    )


def _reduction(
    zero: ZeroConfig,
    topology: Topology,
    make_lane: Callable[[Iterable[int]], Lane],
    layouts: Sequence[FlatLayout],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    operations: Operations | None,
) -> tuple[list[Lane], Reduction]:
    """The lanes of a reduction, and the reduction."""
    if zero.zero_quantized_gradients:
        inside, between = make_lane(topology.node_ranks), make_lane(topology.counterparts)
        codes = Format(zero.zero_quantized_gradients_format, zero.zero_quantization_block or GRADIENT_BLOCK)
        return [inside, between], QuantizedReduction(inside, between, operations, codes, layouts, dtype)
    sizes = {"reduce_bytes": reduce_dtype.itemsize, "sum_bytes": sum_dtype.itemsize}
    scatters = zero.zero_stage >= 1
    if scatters and sums_inside_nodes(topology.nodes, topology.local_world_size, **sizes):
        inside, between = make_lane(topology.node_ranks), make_lane(topology.counterparts)
        largest = max(layout.shard_numel for layout in layouts)
        reduction = TwoHopReduction(inside, between, reduce_dtype, sum_dtype, largest, operations)
        return [inside, between], reduction
    lane = make_lane(range(topology.world_size))
    largest = max(layout.numel for layout in layouts)
    way = None if scatters else whole_sums(topology.nodes, topology.local_world_size)
    return [lane], PlainReduction(lane, reduce_dtype, largest, operations, sums_whole=way)
