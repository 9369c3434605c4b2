"""Gathers of weights, in the compute format or as block-quantised messages (ZeRO++, section 3.1)."""

from collections.abc import Sequence

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, copy
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.interface import Gather
from megatron_zpp.zero.communication_plan import CommunicationPlan, GatherPlan


class PlainGather:
    """Sends parts in the compute format; they land in the buffer that the parameters view.

    A reference of weight differences is fp32 and is cast into its place there. Codes are sent as they are.
    """

    def __init__(self, plan: GatherPlan, comm_stream: CommStream) -> None:
        self._comm_stream, self._kept, self._ranks = comm_stream, plan.kept, len(plan.hop.ranks)

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather. Where both are the same memory there is nothing to write."""
        copy(gather_source, master)

    def gather(
        self,
        full: Tensor,
        gather_source: Tensor,
        keep: Tensor | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """See Gather. `gather_source` may be this rank's own part of `full`."""

        def work() -> None:
            if after is not None:
                after.wait()
            part = gather_source
            if part.dtype != full.dtype:
                part = full.view(self._ranks, -1)[self._comm_stream.group_rank]
                part.copy_(gather_source)
            self._comm_stream.all_gather(full, part)
            if keep is not None:
                keep.copy_(full.view(-1, len(keep))[self._kept])

        return self._comm_stream.submit(work)


class QuantizedGather:
    """qwZ: every rank sends messages of codes and scales, and decodes all of them, its own too.

    So every rank computes with the same bits. They are decoded into the buffer that the parameters view.
    """

    def __init__(self, plan: GatherPlan, comm_stream: CommStream, operations: Operations) -> None:
        assert plan.hop.quant_format is not None
        self._comm_stream, self._operations, self._format = comm_stream, operations, plan.hop.quant_format
        self._kept, self._messages = plan.kept, len(plan.hop.ranks) * plan.shards
        self._received = comm_stream.zeros(*plan.received)

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather."""
        self._operations.quantize(master.to(gather_source.device)[None], gather_source[None], self._format)

    def gather(
        self,
        full: Tensor,
        gather_source: Tensor,
        keep: Tensor | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """See Gather."""

        def work() -> None:
            if after is not None:
                after.wait()
            received = self._received[: len(self._comm_stream.ranks) * len(gather_source)]
            self._comm_stream.all_gather(received, gather_source)
            messages = received.view(self._messages, -1)
            self._operations.dequantize(messages, full.view(self._messages, -1), self._format)
            if keep is not None:
                keep.copy_(full.view(-1, len(keep))[self._kept])

        return self._comm_stream.submit(work)


class TwoHopGather:
    """Gathers between nodes first and then inside the node, so that each element enters a node once.

    Hop 1: a rank gets what its cross-node ranks own, a contiguous part of the unit. Hop 2: the ranks of the
    node exchange these parts. Around one ring of all ranks, (ranks - 1) / ranks of a unit would leave every
    node; this way it is (nodes - 1) / nodes.

    A secondary shard of a node is that same part, so hop 1 fills it and hop 2 is a secondary gather. Hop 2 of
    a unit runs while hop 1 of the next one is on the wire.
    """

    def __init__(
        self,
        plan: CommunicationPlan,
        comm_streams: Sequence[CommStream],
        inside: Gather,
        secondary: Gather | None,
        operations: Operations | None,
    ) -> None:
        """`inside` gathers the parts of the ranks of the node, `secondary` hpZ's parts."""
        self._plan, self._inside, self._secondary, self._operations = plan, inside, secondary, operations
        assert plan.inside_gather is not None
        self._inside_hop = plan.inside_gather.hop
        self._between = comm_streams[plan.gather.hop.stream]
        self._nodes, self._format = len(plan.gather.hop.ranks), plan.gather.hop.quant_format
        # Messages on their way; parts in a dtype arrive where they belong.
        self._relayed = None if self._format is None else self._between.zeros(*plan.relayed).view(2, -1)
        self._reading = [Pending(), Pending()]  # the work that reads each of `_relayed`
        self._turn = 0

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather."""
        self._inside.write_gather_source(master, gather_source)

    def gather(
        self,
        full: Tensor,
        gather_source: Tensor,
        keep: Tensor | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """See Gather."""
        secondary = keep if self._plan.fills_secondary else None  # what hop 1 fills
        if self._relayed is None:
            hop = self._inside_hop
            part = full.view(len(hop.ranks), -1)[hop.group_rank] if secondary is None else secondary
            arrived = self._between.submit(lambda: self._relay(part, gather_source, after))
        else:
            turn, self._turn = self._turn, 1 - self._turn
            part = self._relayed[turn, : self._nodes * len(gather_source)]
            read = self._reading[turn]

            def work() -> None:
                read.wait()
                self._relay(part, gather_source, after)
                if secondary is not None:
                    self._decode(part, secondary)

            arrived = self._between.submit(work)
            if secondary is None:
                self._reading[turn] = self._inside.gather(full, part, keep, after=arrived)
                return self._reading[turn]
        if secondary is not None:
            assert self._secondary is not None
            return self._secondary.gather(full, secondary, after=arrived)
        return self._inside.gather(full, part, keep, after=arrived)

    def _relay(self, part: Tensor, gather_source: Tensor, after: Pending | None) -> None:
        """Hop 1."""
        if after is not None:
            after.wait()
        self._between.all_gather(part, gather_source)

    def _decode(self, part: Tensor, secondary: Tensor) -> None:
        """Decode the message of each node in `part` into `secondary`."""
        assert self._operations is not None
        assert self._format is not None
        self._operations.dequantize(part.view(self._nodes, -1), secondary.view(self._nodes, -1), self._format)
