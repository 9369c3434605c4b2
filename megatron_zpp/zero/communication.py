"""Chooses, once, how the weights and gradients of a run travel."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import GRADIENT_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.plain import (
    Gather,
    PlainGather,
    PlainReduction,
    Reduction,
    TwoHopReduction,
)
from megatron_zpp.zero.collectives.quantized import QuantizedGather, QuantizedReduction
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.theory import all_reduce_algorithm, reduces_in_two_hops


def check_topology(zero: ZeroConfig, topology: Topology) -> None:
    """Raises ValueError, with the sizes that would do, for ZeRO++ flags that these ranks cannot obey."""
    zero.hpz_ranks(topology.local_world_size, topology.nodes)
    if zero.zero_gradient_error_feedback and min(topology.nodes, topology.local_world_size) < 2:
        raise option_error(
            "--zero-gradient-error-feedback",
            "(given)",
            "needs a second hop, so 2 or more nodes of 2 or more ranks; this run has "
            f"{topology.nodes} × {topology.local_world_size}",
        )


@dataclass(frozen=True, kw_only=True)
class SecondaryShards:
    """hpZ: what a group of `ranks` keeps of the weights between the gathers of a step, and how it gathers."""

    comm_stream: CommStream
    gather: Gather
    ranks: int
    quant_format: QuantFormat | None  # None: weights in `dtype`
    dtype: torch.dtype

    def new(self, layout: FlatLayout) -> Tensor:
        """A buffer for this rank's part of a unit."""
        if self.quant_format is None:
            return self.comm_stream.zeros(layout.numel // self.ranks, self.dtype)
        messages = layout.ranks // self.ranks
        return self.comm_stream.zeros(
            messages * self.quant_format.message_bytes(layout.shard_numel), torch.uint8
        )


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What a run's weights and gradients go through."""

    comm_streams: tuple[CommStream, ...]
    filling: CommStream  # of those that gather weights, the one that moves them into parameter slots best
    gather: Gather
    weight_format: QuantFormat | None  # qwZ
    secondary: SecondaryShards | None
    reduction: Reduction


def build_communication(
    zero: ZeroConfig,
    topology: Topology,
    make_comm_stream: Callable[[Iterable[int]], CommStream],
    layouts: Sequence[FlatLayout],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    operations: Operations | None,
) -> Communication:
    """Weights travel in `dtype` or as codes, gradients in `reduce_dtype` or as codes.

    Sums over a node of gradients that are not codes travel in `sum_dtype`. Codes need `operations`. Every
    rank makes the same streams in the same order.
    """
    everyone = range(topology.world_size)
    group = zero.hpz_ranks(topology.local_world_size, topology.nodes)
    group_rank = topology.rank % group

    def gather_on(comm_stream: CommStream, quant_format: QuantFormat | None) -> Gather:
        if quant_format is None:
            return PlainGather(comm_stream, dtype, group_rank)
        return QuantizedGather(comm_stream, operations, quant_format, layouts, group_rank)

    weight_format = None
    if zero.zero_quantized_weights:
        weight_format = QuantFormat(
            zero.zero_quantized_weights_format, zero.zero_quantization_block or WEIGHT_BLOCK
        )
    gathering = make_comm_stream(everyone)
    comm_streams = [gathering]
    secondary = None
    filling = gathering
    if zero.hpz:
        inside = gathering
        if group < topology.world_size:
            inside = make_comm_stream(topology.neighbours(group))
            comm_streams.append(inside)
        quant_format = weight_format if zero.zero_hpz_secondary == "quantized" else None
        secondary = SecondaryShards(
            comm_stream=inside,
            gather=gather_on(inside, quant_format),
            ranks=group,
            quant_format=quant_format,
            dtype=dtype,
        )
        if weight_format is not None or not gathering.uses_copy_engines:
            filling = inside
    reduction_streams, reduction = _reduction(
        zero,
        topology,
        make_comm_stream,
        layouts,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        sum_dtype=sum_dtype,
        operations=operations,
    )
    return Communication(
        comm_streams=(*comm_streams, *reduction_streams),
        filling=filling,
        gather=gather_on(gathering, weight_format),
        weight_format=weight_format,
        secondary=secondary,
        reduction=reduction,
    )


def _reduction(
    zero: ZeroConfig,
    topology: Topology,
    make_comm_stream: Callable[[Iterable[int]], CommStream],
    layouts: Sequence[FlatLayout],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    operations: Operations | None,
) -> tuple[list[CommStream], Reduction]:
    """The streams of a reduction, and the reduction."""
    if zero.zero_quantized_gradients:
        inside, between = make_comm_stream(topology.node_ranks), make_comm_stream(topology.cross_node_ranks)
        quant_format = QuantFormat(
            zero.zero_quantized_gradients_format, zero.zero_quantization_block or GRADIENT_BLOCK
        )
        return [inside, between], QuantizedReduction(
            inside, between, operations, quant_format, layouts, dtype
        )
    sizes = {"reduce_bytes": reduce_dtype.itemsize, "sum_bytes": sum_dtype.itemsize}
    scatters = zero.zero_stage >= 1
    if scatters and reduces_in_two_hops(topology.nodes, topology.local_world_size, **sizes):
        inside, between = make_comm_stream(topology.node_ranks), make_comm_stream(topology.cross_node_ranks)
        largest = max(layout.shard_numel for layout in layouts)
        reduction = TwoHopReduction(inside, between, reduce_dtype, sum_dtype, largest, operations)
        return [inside, between], reduction
    comm_stream = make_comm_stream(range(topology.world_size))
    largest = max(layout.numel for layout in layouts)
    algorithm = None if scatters else all_reduce_algorithm(topology.nodes, topology.local_world_size)
    return [comm_stream], PlainReduction(
        comm_stream, reduce_dtype, largest, operations, all_reduce_algorithm=algorithm
    )
