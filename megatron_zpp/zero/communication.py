"""Makes what a communication plan names: the streams, and the collectives with their buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.differences import WeightDifferences
from megatron_zpp.zero.collectives.gathers import PlainGather, QuantizedGather, TwoHopGather
from megatron_zpp.zero.collectives.group_reductions import FoldedReduceScatter
from megatron_zpp.zero.collectives.interface import AnyReduction, Gather
from megatron_zpp.zero.collectives.quantized_reductions import (
    QuantizedOneHopReduceScatter,
    QuantizedTwoHopReduceScatter,
)
from megatron_zpp.zero.collectives.reductions import (
    LibraryAllReduce,
    LocalSumAllReduce,
    OneHopReduceScatter,
    TwoHopReduceScatter,
    TwoStepAllReduce,
)
from megatron_zpp.zero.communication_plan import CommunicationPlan, GatherPlan
from megatron_zpp.zero.hop import Buffer
from megatron_zpp.zero.reduction_plan import ReductionAlgorithm, ReductionPlan

_REDUCTIONS: dict[ReductionAlgorithm, Callable[..., AnyReduction]] = {
    ReductionAlgorithm.LIBRARY: LibraryAllReduce,
    ReductionAlgorithm.LOCAL_SUM: LocalSumAllReduce,
    ReductionAlgorithm.TWO_STEP: TwoStepAllReduce,
    ReductionAlgorithm.ONE_HOP: OneHopReduceScatter,
    ReductionAlgorithm.TWO_HOPS: TwoHopReduceScatter,
    ReductionAlgorithm.QUANTIZED_ONE_HOP: QuantizedOneHopReduceScatter,
    ReductionAlgorithm.QUANTIZED_TWO_HOPS: QuantizedTwoHopReduceScatter,
}


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What a run's weights and gradients go through. `plan` knows what the streams can do."""

    plan: CommunicationPlan
    comm_streams: tuple[CommStream, ...]
    gather: Gather
    secondary: Gather | None  # hpZ
    differences: WeightDifferences | None  # what crosses nodes in place of `gather`, which is `secondary`
    reduction: AnyReduction  # see `build_reduction`

    @property
    def weight_format(self) -> QuantFormat | None:
        """The format in which the optimizer writes weights; None where that is the compute format or fp32."""
        return self.plan.gather.hop.quant_format

    def zeros(self, stream: int, buffer: Buffer) -> Tensor:
        """Memory that a stream of the plan sends or fills. Every rank must make the same."""
        return self.comm_streams[stream].zeros(*buffer)


def build_communication(
    plan: CommunicationPlan,
    make_comm_stream: Callable[[Sequence[int]], CommStream],
    operations: Operations | None,
) -> Communication:
    """The streams and collectives of a plan. Quantised ones need `operations`.

    Whether ranks can write each other's memory is known when their streams exist.
    """
    comm_streams = tuple(make_comm_stream(ranks) for ranks in plan.streams)
    plan = plan.with_peer_writes(comm_streams[plan.reduction.hops[0].stream].writes_peers)
    inside: Gather | None = None
    secondary: Gather | None = None
    differences = None
    gather: Gather
    if plan.inside_gather is not None:
        inside = build_gather(plan.inside_gather, comm_streams, operations)
    if plan.secondary is not None:
        same = plan.secondary == plan.inside_gather
        secondary = inside if same else build_gather(plan.secondary, comm_streams, operations)
    if plan.difference_format is not None:
        assert operations is not None
        references = plan.secondary_gather
        gather = secondary = PlainGather(references, comm_streams[references.hop.stream])
        between = [comm_streams[stream] for stream in plan.gather.hop.streams]
        groups = plan.among_groups
        among = None if groups is None else comm_streams[groups.hop.stream]
        differences = WeightDifferences(plan, between, among, operations)
    elif inside is None:
        gather = build_gather(plan.gather, comm_streams, operations)
    else:
        gather = TwoHopGather(plan, comm_streams, inside, secondary, operations)
    return Communication(
        plan=plan,
        comm_streams=comm_streams,
        gather=gather,
        secondary=secondary,
        differences=differences,
        reduction=build_reduction(plan.reduction, comm_streams, operations),
    )


def build_gather(
    plan: GatherPlan, comm_streams: Sequence[CommStream], operations: Operations | None
) -> Gather:
    """The gather of a plan, on its stream."""
    comm_stream = comm_streams[plan.hop.stream]
    if plan.hop.quant_format is None:
        return PlainGather(plan, comm_stream)
    assert operations is not None
    return QuantizedGather(plan, comm_stream, operations)


def build_reduction(
    plan: ReductionPlan, comm_streams: Sequence[CommStream], operations: Operations | None
) -> AnyReduction:
    """The reduction of a plan, on the streams of its hops and fold.

    A Reduction unless there is a fold; a GroupReduction where gradients accumulate in groups.
    """
    hops = plan.hops if plan.fold is None else (*plan.hops, plan.fold)
    streams = [[comm_streams[stream] for stream in hop.streams] for hop in hops]
    if plan.fold is not None and not plan.algorithm.several_hops:
        return FoldedReduceScatter(plan, streams, operations)
    return _REDUCTIONS[plan.algorithm](plan, streams, operations)
